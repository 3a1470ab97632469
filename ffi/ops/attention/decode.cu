#include "ops/attention/decode.cuh"
#include "ops/attention/decode.h"
#include "ops/attention/launch.cuh"

namespace jaxops::attention {
namespace {

template <class Tile>
Error LaunchTile(const char* handler, Device stream, DecodeArguments* arguments) {
  using T = typename Tile::T;
  const Problem& p = arguments->problem;
  for (const cudaError_t status :
       {DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments->k), DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments->v)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(handler, status));
  const int64_t key_heads = int64_t{p.batches} * p.key_heads, lines = key_heads * p.queries * p.group();
  const Grid grid = {.blocks = key_heads * arguments->row_tiles * arguments->splits,
                     .threads = Tile::kThreads,
                     .shared_bytes = Tile::kSharedBytes};
  JAXOPS_RETURN_IF_ERROR(FromCuda(handler, Launch(stream, AttentionDecode<Tile>, grid, *arguments)));
  const Grid join = {.blocks = CeilDiv(lines * 32, kJoinThreads), .threads = kJoinThreads};
  return FromCuda(handler, Launch(stream, JoinDecoded<T>, join, *arguments));
}

}  // namespace

Error LaunchDecode(const char* handler, Device stream, const Problem& p, DataType type, int splits, float* partial) {
  DecodeArguments arguments = {};
  arguments.problem = p;
  arguments.splits = splits;
  arguments.row_tiles = static_cast<int>(CeilDiv(int64_t{p.queries} * p.group(), 64));
  arguments.partial = partial;
  arguments.statistics =
      reinterpret_cast<float2*>(partial + splits * int64_t{p.batches} * p.queries * p.heads * p.depth);
  return VisitType(handler, type, [&]<class T> {
    if (p.depth <= 64) return LaunchTile<DecodeTile<T, 64>>(handler, stream, &arguments);
    if (p.depth <= 128) return LaunchTile<DecodeTile<T, 128>>(handler, stream, &arguments);
    return LaunchTile<DecodeTile<T, 256>>(handler, stream, &arguments);
  });
}

}  // namespace jaxops::attention
