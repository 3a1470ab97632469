#include "ops/attention/backward.cuh"
#include "ops/attention/launch.cuh"
#include "ops/attention/segments.cuh"

namespace jaxops {
namespace {

using attention::BackwardArguments;
using attention::BackwardSums;
using attention::BackwardTile;
using attention::CeilDiv;
using attention::PreparationArguments;
using attention::Problem;

constexpr const char* kHandler = "attention_bwd";

struct BackwardOptions : attention::Options {
  bool has_dlse, wants_dbias;
};

struct Gradients {
  void *dq, *dk, *dv;
};

// Where segments' plans are written; null without segments.
struct SegmentSpace {
  int32_t* ranges;
  attention::Span *queries, *keys, *halves;
};

template <class Tile>
Error LaunchBackward(Device stream, const PreparationArguments& known, const SegmentSpace& segments,
                     const Gradients& gradients) {
  using T = typename Tile::T;
  const Problem& p = known.problem;
  BackwardArguments arguments = {};
  arguments.problem = p;
  arguments.sums = known.sums;
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, Tile::kQueries, &arguments.q),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v),
                                   attention::DescribeQueries<T>(p, known.dout, Tile::kQueries, &arguments.dout),
                                   attention::DescribeKeys<T>(p, gradients.dk, Tile::kKeys, &arguments.dk),
                                   attention::DescribeKeys<T>(p, gradients.dv, Tile::kKeys, &arguments.dv)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  const int64_t heads = int64_t{p.batches} * p.heads, key_heads = int64_t{p.batches} * p.key_heads;
  const int64_t tiles = key_heads * CeilDiv(p.keys, Tile::kKeys), query_blocks = heads * known.sums.blocks;
  const int64_t lines = heads * known.sums.padded;
  if (tiles > attention::kLongest || query_blocks > attention::kLongest) return Invalid(kHandler, "too many tokens");
  // Q, dO and the sums of dQ of a head; measured on an H200.
  const double bytes = 8.0 * p.queries * p.depth * p.group();
  arguments.together = attention::HeadsTogether(key_heads, bytes, 46e6, 4, p.depth <= 64 ? 32 : 12);
  const Grid lines_grid = {.blocks = CeilDiv(lines * attention::kPreparationLanes, attention::kPreparationThreads),
                           .threads = attention::kPreparationThreads};
  JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, Launch(stream, attention::PrepareBackward<T>, lines_grid, known)));
  if (p.query_segments) {
    arguments.segments = segments.keys;
    arguments.halves = segments.halves;
    for (const cudaError_t status :
         {attention::LaunchSegmentRanges(stream, p, segments.ranges),
          attention::LaunchSegmentPlan(stream, p, segments.ranges, true, Tile::kQueries, Tile::kKeys, segments.queries),
          attention::LaunchSegmentPlan(stream, p, segments.ranges, false, Tile::kKeys, Tile::kQueries, segments.keys),
          attention::LaunchSegmentPlan(stream, p, segments.ranges, false, 64, Tile::kQueries, segments.halves)})
      JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  }
  const Grid grid = {.blocks = std::min<int64_t>(tiles, attention::Multiprocessors()),
                     .threads = Tile::kThreads,
                     .shared_bytes = Tile::kSharedBytes};
  if (grid.blocks == 0) return Error::Internal("attention_bwd: no device");
  JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, Launch(stream, attention::AttentionBackward<Tile>, grid, arguments)));
  const Grid finish_grid = {.blocks = query_blocks, .threads = attention::kFinishThreads};
  return FromCuda(kHandler, Launch(stream, attention::FinishQueries<T, Tile::kDepth, Tile::kGeneral>, finish_grid, p,
                                   known.sums, static_cast<T*>(gradients.dq)));
}

template <class T>
Error BackwardOf(Device stream, const PreparationArguments& known, const SegmentSpace& segments,
                 const Gradients& gradients) {
  const Problem& p = known.problem;
  if (p.is_general()) {
    return p.depth <= 64 ? LaunchBackward<BackwardTile<T, 64, true>>(stream, known, segments, gradients)
                         : LaunchBackward<BackwardTile<T, 128, true>>(stream, known, segments, gradients);
  }
  return p.depth <= 64 ? LaunchBackward<BackwardTile<T, 64, false>>(stream, known, segments, gradients)
                       : LaunchBackward<BackwardTile<T, 128, false>>(stream, known, segments, gradients);
}

// Parts of the workspace, each aligned to 16 bytes; jaxops/ops/_attention.py knows the size.
Error DivideWorkspace(const Problem& p, const AnyBuffer& workspace, BackwardSums* sums, SegmentSpace* segments) {
  const int64_t heads = int64_t{p.batches} * p.heads;
  sums->padded = static_cast<int>(CeilDiv(p.queries, 128) * 128);
  sums->blocks = static_cast<int>(CeilDiv(p.queries, attention::QueriesAtOnce(p.depth <= 64 ? 64 : 128)));
  sums->descending = p.right < attention::kLongest;
  int64_t words = 0;
  const auto take = [&](int64_t count) {
    int32_t* const part = Data<int32_t>(workspace) + words;
    words += CeilDiv(count, 4) * 4;
    return part;
  };
  sums->dq = reinterpret_cast<float*>(take(heads * sums->blocks * 2 * attention::kPartFloats));
  sums->lse = reinterpret_cast<float*>(take(heads * sums->padded));
  sums->delta = reinterpret_cast<float*>(take(heads * sums->padded));
  sums->turns = take(heads * sums->blocks * 2);
  sums->tickets = take(1);
  if (p.query_segments) {
    const auto take_spans = [&](int64_t blocks) {
      return reinterpret_cast<attention::Span*>(take(p.batches * blocks * 4));
    };
    segments->ranges = take(attention::RangeWords(p));
    segments->queries = take_spans(sums->blocks);
    segments->keys = take_spans(CeilDiv(p.keys, 128));
    segments->halves = take_spans(CeilDiv(p.keys, 64));
    sums->segments = segments->queries;
  }
  return attention::CheckWorkspace(kHandler, workspace, words);
}

// q, k, v, out, lse, dout, [dlse], and the options' operands -> dq, dk, dv
Error AttentionBackward(Device stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer out, AnyBuffer lse,
                        AnyBuffer dout, ffi::RemainingArgs rest, BufferResult dq, BufferResult dk, BufferResult dv,
                        BufferResult workspace, BackwardOptions options) {
  for (const AnyBuffer& buffer : {q, k, v, out, lse, dout, *dq, *dk, *dv, *workspace})
    JAXOPS_RETURN_IF_ERROR(CheckBuffer(kHandler, buffer));
  BufferReader<ffi::RemainingArgs> operands(kHandler, rest);
  std::optional<AnyBuffer> dlse;
  if (options.has_dlse) JAXOPS_RETURN_IF_ERROR(operands.Take(&dlse));
  PreparationArguments known = {};
  SegmentSpace segments = {};
  Problem& p = known.problem;
  JAXOPS_RETURN_IF_ERROR(attention::ParseProblem(kHandler, q, k, v, options, &operands, &p));
  const DataType type = q.element_type();
  const int64_t batches = p.batches, queries = p.queries, keys = p.keys, heads = p.heads, key_heads = p.key_heads;
  const int64_t depth = p.depth;
  for (const auto& [name, buffer] : {std::pair("out", out), std::pair("dout", dout), std::pair("dq", *dq)})
    JAXOPS_RETURN_IF_ERROR(attention::CheckShape(kHandler, name, buffer, type, {batches, queries, heads, depth}));
  for (const auto& [name, buffer] : {std::pair("dk", *dk), std::pair("dv", *dv)})
    JAXOPS_RETURN_IF_ERROR(attention::CheckShape(kHandler, name, buffer, type, {batches, keys, key_heads, depth}));
  JAXOPS_RETURN_IF_ERROR(attention::CheckShape(kHandler, "lse", lse, DataType::F32, {batches, heads, queries}));
  if (dlse)
    JAXOPS_RETURN_IF_ERROR(attention::CheckShape(kHandler, "dlse", *dlse, DataType::F32, {batches, heads, queries}));
  for (const AnyBuffer& buffer : {q, k, v, out, dout, *dq, *dk, *dv})
    if (!IsAligned(buffer.untyped_data())) return Invalid(kHandler, "an operand or a result is not 16-byte aligned");
  if (CompiledCapability() != kHopper)
    return Error(ffi::ErrorCode::kUnimplemented, "attention_bwd: this GPU has no wgmma");
  if (p.depth > 128) return Invalid(kHandler, "depths above 128");
  JAXOPS_RETURN_IF_ERROR(DivideWorkspace(p, *workspace, &known.sums, &segments));
  known.out = out.untyped_data();
  known.dout = dout.untyped_data();
  known.lse = Data<float>(lse);
  known.dlse = dlse ? Data<float>(*dlse) : nullptr;
  const Gradients gradients = {dq->untyped_data(), dk->untyped_data(), dv->untyped_data()};
  return attention::VisitType(kHandler, type,
                              [&]<class T> { return BackwardOf<T>(stream, known, segments, gradients); });
}

}  // namespace
}  // namespace jaxops

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxops::BackwardOptions, JAXOPS_ATTENTION_OPTIONS, StructMember<bool>("has_dlse"),
                                      StructMember<bool>("wants_dbias"));

JAXOPS_HANDLER(attention_bwd, jaxops::AttentionBackward,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Ret<jaxops::AnyBuffer>()
                   .Attrs<jaxops::BackwardOptions>());
