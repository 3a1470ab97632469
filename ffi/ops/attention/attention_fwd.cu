#include "ops/attention/decode.h"
#include "ops/attention/forward.cuh"
#include "ops/attention/launch.cuh"
#include "ops/attention/reach.cuh"
#include "ops/attention/unseen.cuh"

namespace jaxops {
namespace {

using attention::ForwardArguments;
using attention::ForwardTile;
using attention::Options;
using attention::Problem;

constexpr const char* kHandler = "attention_fwd";
constexpr int64_t kCounterWords = 4;  // in the workspace: tile counters, and the reach's gaps

template <class Tile>
Error LaunchForward(Device stream, const Problem& p, const attention::Reach& reach, int32_t* counters) {
  using T = typename Tile::T;
  ForwardArguments arguments = {};
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, 64, &arguments.q),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v),
                                   attention::DescribeResults<T>(p, p.out, 64, &arguments.out)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  if (Tile::kExtraStages > 0) arguments.fetched = attention::DescribeScores<T>(p, 64, &arguments.extra);
  const int64_t heads = int64_t{p.batches} * p.heads, tiles = heads * attention::CeilDiv(p.queries, Tile::kRows);
  if (tiles > std::numeric_limits<int32_t>::max()) return Invalid(kHandler, "too many queries");
  // Measured on an H200: causal calls visit half of their keys, so twice as much fits.
  const double bytes = 4.0 * p.keys * p.depth / p.group();
  arguments.problem = p;
  arguments.reach = reach;
  const int blocks = attention::Multiprocessors();
  if (blocks == 0) return Error::Internal("attention_fwd: no device");
  // If all tiles of a call have equal work, heads go one after the other, which spreads the loads over time.
  arguments.is_skewed = p.right < attention::kLongest || (p.mask.data && p.mask.query_stride);
  const int64_t rows = tiles / heads, most = arguments.is_skewed ? heads : std::max<int64_t>(blocks / rows, 1);
  arguments.together = attention::HeadsTogether(heads, bytes, arguments.is_skewed ? 25e6 : 12.5e6, 1, most);
  // A few tiles of equal work need no counter.
  if (tiles > (arguments.is_skewed || reach.of_queries ? 1 : 8) * int64_t{blocks}) {
    arguments.counters = counters;
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, cudaMemsetAsync(counters, 0, sizeof(int32_t), stream)));
  }
  const Grid grid = {
      .blocks = std::min<int64_t>(tiles, blocks), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes};
  return FromCuda(kHandler, Launch(stream, attention::AttentionForward<Tile>, grid, arguments));
}

// The tiles. TFLOP/s on an H200 (bf16, 16 heads; one sequence of 16384, several shorter ones; causal counts half):
//   depth     tile      causal 1024  4096  16384   full 1024  4096  16384
//    64     128 x 128          315
//    64     192 x 128                458    534        417    530    563
//   128     128 x 128          460   652    712        611    707    743
//   192     128 x 96                 657
//   256     128 x 80                 665
// 192 query rows are faster where there are many tiles and each sees more than a few key blocks: 80 us instead of 85
// for 8 x 1024 tokens, full; causal 4 x 2048 tokens are still slower, 95 instead of 91. At depth 128, 128 x 176 tiles
// gain 2 % from 8192 keys on, and lose 9 % in causal calls with 2048. General calls wait for each product; the work on
// scores bounds them.
template <class T>
Error ForwardOf(Device stream, const Problem& p, const attention::Reach& reach, int32_t* counters) {
  const auto launch = [&]<class Tile> { return LaunchForward<Tile>(stream, p, reach, counters); };
  if (p.is_general() || reach.decides) {
    JAXOPS_RETURN_IF_ERROR(p.depth > 128  ? (launch.template operator()<ForwardTile<T, 256, 2, 80, 2, 1, true>>())
                           : p.depth > 64 ? (launch.template operator()<ForwardTile<T, 128, 2, 128, 2, 1, true>>())
                                          : (launch.template operator()<ForwardTile<T, 64, 2, 128, 3, 2, true>>()));
    if (p.is_general()) return Error::Success();
  }
  if (p.depth > 192) return launch.template operator()<ForwardTile<T, 256, 2, 80, 2, 1, false>>();
  if (p.depth > 128) return launch.template operator()<ForwardTile<T, 192, 2, 96, 2, 1, false>>();
  if (p.depth > 64) return launch.template operator()<ForwardTile<T, 128, 2, 128, 2, 2, false>>();
  const int least = p.right < attention::kLongest ? 4096 : 1024;
  const bool is_short = std::min(p.queries, p.keys) < least || p.left < 2048 || reach.of_queries;
  return !is_short ? launch.template operator()<ForwardTile<T, 64, 3, 128, 3, 2, false>>()
                   : launch.template operator()<ForwardTile<T, 64, 2, 128, 3, 2, false>>();
}

// q, k, v, and any bias, mask, lengths, segments, sinks and query_offset -> out, lse, [maximum, log_sum]. A workspace
// with room for partial results asks for the few-query kernel, which splits the keys into as many parts as the
// workspace holds.
Error AttentionForward(Device stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, ffi::RemainingArgs rest, BufferResult out,
                       BufferResult lse, ffi::RemainingRets more, Options options) {
  Problem problem;
  std::optional<AnyBuffer> workspace;
  JAXOPS_RETURN_IF_ERROR(
      attention::ParseForward(kHandler, q, k, v, rest, *out, *lse, more, options, &problem, &workspace));
  int32_t* const counters = Data<int32_t>(*workspace);
  int64_t words = kCounterWords;
  const auto take = [&](int64_t count) {
    int32_t* const part = counters + words;
    words += attention::CeilDiv(count, 4) * 4;
    return part;
  };
  const attention::Reach reach = attention::TakeReach(problem, take, counters + 1, 0, 0);
  JAXOPS_RETURN_IF_ERROR(attention::CheckWorkspace(kHandler, *workspace, words));
  const int64_t splits = (static_cast<int64_t>(workspace->element_count()) - words) / attention::DecodeWords(problem);
  const auto attend = [&]<class T>() -> Error {
    if (splits > 0) {
      const int64_t most = attention::CeilDiv(problem.keys, 64);
      return attention::LaunchDecode(kHandler, stream, problem, q.element_type(),
                                     static_cast<int>(std::min(splits, most)), Data<float>(*workspace));
    }
    if (reach.gaps) JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, cudaMemsetAsync(reach.gaps, 0, sizeof(int32_t), stream)));
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, attention::LaunchReach(stream, problem, reach, 0, 0)));
    return ForwardOf<T>(stream, problem, reach, counters);
  };
  return attention::VisitType(kHandler, q.element_type(), [&]<class T> {
    JAXOPS_RETURN_IF_ERROR(attend.template operator()<T>());
    return options.unseen_mean ? FromCuda(kHandler, attention::LaunchAverage<T>(stream, problem)) : Error::Success();
  });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(attention_fwd, jaxops::AttentionForward,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .RemainingRets()
                   .Attrs<jaxops::attention::Options>());
