#include "ops/attention/decode.h"
#include "ops/attention/forward.cuh"
#include "ops/attention/launch.cuh"
#include "ops/attention/segments.cuh"

namespace jaxops {
namespace {

using attention::ForwardArguments;
using attention::ForwardTile;
using attention::Options;
using attention::Problem;

constexpr const char* kHandler = "attention_fwd";
constexpr int64_t kCounterWords = 4;  // of the workspace; then come the segments' ranges and spans

template <class Tile>
Error LaunchForward(Device stream, const Problem& p, int32_t* workspace) {
  using T = typename Tile::T;
  ForwardArguments arguments = {};
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, 64, &arguments.q),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v),
                                   attention::DescribeQueries<T>(p, p.out, 64, &arguments.out)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  const int64_t heads = int64_t{p.batches} * p.heads, tiles = heads * attention::CeilDiv(p.queries, Tile::kRows);
  if (tiles > std::numeric_limits<int32_t>::max()) return Invalid(kHandler, "too many queries");
  // Measured on an H200: of causal calls, half of whose keys are visited, twice as much fits.
  const double bytes = 4.0 * p.keys * p.depth / p.group();
  arguments.problem = p;
  arguments.together = attention::HeadsTogether(heads, bytes, p.right < attention::kLongest ? 25e6 : 12.5e6, 1, heads);
  const int blocks = attention::Multiprocessors();
  if (blocks == 0) return Error::Internal("attention_fwd: no device");
  if (tiles > blocks) {
    arguments.counters = workspace;
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, cudaMemsetAsync(workspace, 0, sizeof(int32_t), stream)));
  }
  if (p.query_segments) {
    int32_t* const ranges = workspace + kCounterWords;
    auto* const spans = reinterpret_cast<attention::Span*>(ranges + attention::RangeWords(p));
    arguments.segments = spans;
    for (const cudaError_t status : {attention::LaunchSegmentRanges(stream, p, ranges),
                                     attention::LaunchSegmentPlan(stream, p, ranges, true, 64, Tile::kKeys, spans)})
      JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  }
  const Grid grid = {
      .blocks = std::min<int64_t>(tiles, blocks), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes};
  return FromCuda(kHandler, Launch(stream, attention::AttentionForward<Tile>, grid, arguments));
}

// The tiles. TFLOP/s on an H200 (bf16, 12 to 16 heads; one sequence of 16384, several shorter ones; causal counts
// half):
//   depth     tile      causal 1024  4096  16384   full 1024  4096  16384
//    64     128 x 128          282                     362
//    64     192 x 128                478    568               526    563
//   128     128 x 128          462   655    738        601    711    738
//   192     128 x 96                 665
//   256     128 x 80                 638                      751
// 192 rows of queries are ahead from 2048 queries on, where tiles are many. At depth 128, tiles of 128 x 176 gain 2 %
// from 8192 keys on, and lose 9 % in causal calls of 2048. General calls wait for each product; their scores bound
// them.
template <class T>
Error ForwardOf(Device stream, const Problem& p, int32_t* workspace) {
  if (p.is_general()) {
    if (p.depth > 128) return LaunchForward<ForwardTile<T, 256, 2, 80, 2, 1, true>>(stream, p, workspace);
    return p.depth <= 64 ? LaunchForward<ForwardTile<T, 64, 2, 128, 3, 2, true>>(stream, p, workspace)
                         : LaunchForward<ForwardTile<T, 128, 2, 128, 2, 2, true>>(stream, p, workspace);
  }
  if (p.depth > 192) return LaunchForward<ForwardTile<T, 256, 2, 80, 2, 1, false>>(stream, p, workspace);
  if (p.depth > 128) return LaunchForward<ForwardTile<T, 192, 2, 96, 2, 1, false>>(stream, p, workspace);
  if (p.depth > 64) return LaunchForward<ForwardTile<T, 128, 2, 128, 2, 2, false>>(stream, p, workspace);
  return p.queries >= 2048 ? LaunchForward<ForwardTile<T, 64, 3, 128, 3, 2, false>>(stream, p, workspace)
                           : LaunchForward<ForwardTile<T, 64, 2, 128, 3, 2, false>>(stream, p, workspace);
}

// q, k, v, and those that there are of bias, mask, lengths, segments, sinks and query_offset -> out, lse. A workspace
// with room for partial results asks for the kernel of few queries, which splits the keys as often as there is room
// for.
Error AttentionForward(Device stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, ffi::RemainingArgs rest, BufferResult out,
                       BufferResult lse, BufferResult workspace, Options options) {
  Problem problem;
  JAXOPS_RETURN_IF_ERROR(attention::ParseForward(kHandler, q, k, v, rest, *out, *lse, *workspace, options, &problem));
  const int64_t spans = problem.batches * attention::CeilDiv(problem.queries, 64);
  const int64_t words = kCounterWords + (problem.query_segments ? attention::RangeWords(problem) + spans * 4 : 0);
  JAXOPS_RETURN_IF_ERROR(attention::CheckWorkspace(kHandler, *workspace, words));
  const int64_t splits = (static_cast<int64_t>(workspace->element_count()) - words) / attention::DecodeWords(problem);
  if (splits > 0) {
    const int64_t most = attention::CeilDiv(problem.keys, 64);
    return attention::LaunchDecode(kHandler, stream, problem, q.element_type(),
                                   static_cast<int>(std::min(splits, most)), Data<float>(*workspace));
  }
  return attention::VisitType(kHandler, q.element_type(),
                              [&]<class T> { return ForwardOf<T>(stream, problem, Data<int32_t>(*workspace)); });
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
                   .Ret<jaxops::AnyBuffer>()
                   .Attrs<jaxops::attention::Options>());
