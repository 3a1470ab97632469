#include "ops/attention/decode.cuh"
#include "ops/attention/launch.cuh"

namespace jaxops {
namespace {

using attention::CeilDiv;
using attention::DecodeArguments;
using attention::DecodeTile;
using attention::Options;
using attention::Problem;

constexpr const char* kHandler = "attention_decode";

template <class Tile>
Error LaunchDecode(Device stream, const DecodeArguments& call) {
  using T = typename Tile::T;
  DecodeArguments arguments = call;
  const Problem& p = arguments.problem;
  for (const cudaError_t status : {attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  const int64_t key_heads = int64_t{p.batches} * p.key_heads, lines = key_heads * p.queries * p.group();
  const Grid grid = {.blocks = key_heads * arguments.row_tiles * arguments.splits,
                     .threads = Tile::kThreads,
                     .shared_bytes = Tile::kSharedBytes};
  JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, Launch(stream, attention::AttentionDecode<Tile>, grid, arguments)));
  const Grid join = {.blocks = CeilDiv(lines * 32, attention::kJoinThreads), .threads = attention::kJoinThreads};
  return FromCuda(kHandler, Launch(stream, attention::JoinDecoded<T>, join, arguments));
}

template <class T>
Error DecodeOf(Device stream, const DecodeArguments& call) {
  if (call.problem.depth <= 64) return LaunchDecode<DecodeTile<T, 64>>(stream, call);
  if (call.problem.depth <= 128) return LaunchDecode<DecodeTile<T, 128>>(stream, call);
  return LaunchDecode<DecodeTile<T, 256>>(stream, call);
}

// As attention_fwd. The workspace's size, in multiples of heads' rows and their statistics, says how often keys are
// split.
Error AttentionDecode(Device stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, ffi::RemainingArgs rest, BufferResult out,
                      BufferResult lse, BufferResult workspace, Options options) {
  DecodeArguments call = {};
  Problem& p = call.problem;
  JAXOPS_RETURN_IF_ERROR(attention::ParseForward(kHandler, q, k, v, rest, *out, *lse, *workspace, options, &p));
  const int64_t lines = int64_t{p.batches} * p.queries * p.heads, words = lines * (p.depth + 2);
  JAXOPS_RETURN_IF_ERROR(attention::CheckWorkspace(kHandler, *workspace, words));
  const int64_t splits = static_cast<int64_t>(workspace->element_count()) / words;
  call.splits = static_cast<int>(std::min<int64_t>(splits, CeilDiv(p.keys, 64)));
  call.row_tiles = static_cast<int>(CeilDiv(int64_t{p.queries} * p.group(), 64));
  call.partial = reinterpret_cast<float*>(Data<int32_t>(*workspace));
  call.statistics = reinterpret_cast<float2*>(call.partial + call.splits * lines * p.depth);
  return attention::VisitType(kHandler, q.element_type(), [&]<class T> { return DecodeOf<T>(stream, call); });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(attention_decode, jaxops::AttentionDecode,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Attrs<jaxops::attention::Options>());
