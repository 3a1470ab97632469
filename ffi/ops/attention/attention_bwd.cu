#include "ops/attention/backward.cuh"
#include "ops/attention/backward_wide.cuh"
#include "ops/attention/dbias.cuh"
#include "ops/attention/launch.cuh"
#include "ops/attention/reach.cuh"
#include "ops/attention/unseen.cuh"

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
  bool apart;    // dk and dv are each query head's own, in f32, to be summed over the heads that share a key head
  void* dbias;   // null unless it is wanted
  bool rounded;  // dbias has q's dtype, otherwise f32
};

// How many keys a block of the backward pass takes.
int KeysOfBlock(const Problem& p) { return p.depth > 128 ? 64 : 128; }

template <class T>
Error LaunchPreparation(Device stream, const PreparationArguments& known) {
  const Problem& p = known.problem;
  const int64_t lines = int64_t{p.batches} * p.heads * known.sums.blocks * known.sums.block_size;
  const Grid grid = {.blocks = CeilDiv(lines * attention::kPreparationLanes, attention::kPreparationThreads),
                     .threads = attention::kPreparationThreads};
  return FromCuda(kHandler, Launch(stream, attention::PrepareBackward<T>, grid, known));
}

template <class Tile>
Error LaunchBackward(Device stream, const PreparationArguments& known, const Gradients& gradients) {
  using T = typename Tile::T;
  const Problem& p = known.problem;
  BackwardArguments arguments = {};
  Problem& apart = arguments.problem = p;
  if (gradients.apart) apart.key_heads = p.heads;
  arguments.sharing = apart.key_heads / p.key_heads;
  arguments.sums = known.sums;
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, Tile::kQueries, &arguments.q),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v),
                                   attention::DescribeResults<T>(p, known.dout, Tile::kQueries, &arguments.dout)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  if (gradients.apart) {
    arguments.wide_dk = static_cast<float*>(gradients.dk);
    arguments.wide_dv = static_cast<float*>(gradients.dv);
  } else {
    for (const cudaError_t status : {attention::DescribeKeys<T>(p, gradients.dk, 64, &arguments.dk),
                                     attention::DescribeKeys<T>(p, gradients.dv, 64, &arguments.dv)})
      JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  }
  if (Tile::kExtraStages > 0) arguments.fetched = attention::DescribeScores<T>(p, Tile::kQueries, &arguments.extra);
  const int64_t key_heads = int64_t{p.batches} * apart.key_heads, tiles = key_heads * CeilDiv(p.keys, Tile::kKeys);
  const int64_t query_blocks = int64_t{p.batches} * p.heads * known.sums.blocks;
  if (tiles > attention::kLongest || query_blocks > attention::kLongest) return Invalid(kHandler, "too many tokens");
  // One head's Q, dO and dQ sums; measured on an H200. With more heads, the blocks of one head wait less for each
  // other.
  const double bytes = 8.0 * p.queries * p.depth * apart.group();
  const int blocks = attention::Multiprocessors();
  if (blocks == 0) return Error::Internal("attention_bwd: no device");
  arguments.together = attention::HeadsTogether(key_heads, bytes, 46e6, 4, blocks);
  const Grid grid = {
      .blocks = std::min<int64_t>(tiles, blocks), .threads = Tile::kThreads, .shared_bytes = Tile::kSharedBytes};
  return FromCuda(kHandler, Launch(stream, attention::AttentionBackward<Tile>, grid, arguments));
}

template <class T, int kDepth>
Error LaunchFinish(Device stream, const PreparationArguments& known, const Gradients& gradients) {
  const Problem& p = known.problem;
  const Grid grid = {.blocks = int64_t{p.batches} * p.heads * known.sums.blocks, .threads = attention::kFinishThreads};
  return FromCuda(kHandler, Launch(stream, attention::FinishQueries<T, kDepth>, grid, p, known.sums,
                                   static_cast<T*>(gradients.dq)));
}

template <class Tile>
Error LaunchWideBackward(Device stream, const PreparationArguments& known, const Gradients& gradients) {
  using T = typename Tile::T;
  const Problem& p = known.problem;
  attention::WideArguments arguments = {};
  arguments.problem = p;
  arguments.statistics = known.sums.statistics;
  arguments.query_blocks = known.sums.blocks;
  arguments.key_blocks = static_cast<int>(CeilDiv(p.keys, Tile::kKeys));
  arguments.reach = known.sums.reach;
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, 64, &arguments.q),
                                   attention::DescribeResults<T>(p, known.dout, 64, &arguments.dout),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kStepKeys, &arguments.step_k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kStepKeys, &arguments.step_v),
                                   attention::DescribeQueries<T>(p, gradients.dq, 64, &arguments.dq),
                                   attention::DescribeKeys<T>(p, gradients.dk, Tile::kKeys, &arguments.dk),
                                   attention::DescribeKeys<T>(p, gradients.dv, Tile::kKeys, &arguments.dv)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  const Grid keys = {.blocks = int64_t{p.batches} * p.key_heads * arguments.key_blocks,
                     .threads = Tile::kThreads,
                     .shared_bytes = Tile::kKeysShared};
  JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, Launch(stream, attention::WideBackwardKeys<Tile>, keys, arguments)));
  const Grid queries = {.blocks = int64_t{p.batches} * p.heads * CeilDiv(arguments.query_blocks, 2),
                        .threads = Tile::kThreads,
                        .shared_bytes = Tile::kQueriesShared};
  return FromCuda(kHandler, Launch(stream, attention::WideBackwardQueries<Tile>, queries, arguments));
}

template <class T>
Error LaunchBiasGradient(Device stream, const PreparationArguments& known, const Gradients& gradients) {
  using Tile = attention::BiasTile;
  const Problem& p = known.problem;
  attention::BiasArguments arguments = {};
  for (const cudaError_t status : {attention::DescribeQueries<T>(p, p.q, Tile::kRows, &arguments.q),
                                   attention::DescribeResults<T>(p, known.dout, Tile::kRows, &arguments.dout),
                                   attention::DescribeKeys<T>(p, p.k, Tile::kKeys, &arguments.k),
                                   attention::DescribeKeys<T>(p, p.v, Tile::kKeys, &arguments.v)})
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  arguments.fetched = attention::DescribeScores<T>(p, 64, &arguments.extra);
  arguments.problem = p;
  arguments.sums = known.sums;
  arguments.dbias = gradients.dbias;
  arguments.rounded = gradients.rounded;
  arguments.batches = p.bias.batch_stride ? p.batches : 1;
  arguments.heads = p.bias.head_stride ? p.heads : 1;
  arguments.row_blocks = p.bias.query_stride ? static_cast<int>(CeilDiv(p.queries, Tile::kRows)) : 1;
  arguments.tiles = int64_t{arguments.batches} * arguments.heads * arguments.row_blocks * CeilDiv(p.keys, Tile::kKeys);
  const int blocks = attention::Multiprocessors();
  if (blocks == 0) return Error::Internal("attention_bwd: no device");
  const Grid grid = {.blocks = std::min<int64_t>(arguments.tiles, blocks),
                     .threads = Tile::kThreads,
                     .shared_bytes = Tile::kSharedBytes};
  return FromCuda(kHandler, Launch(stream, attention::AttentionBiasGradient<T>, grid, arguments));
}

// The preparation, the passes over the tiles, and the rounding of dQ. Ordered additions to dQ cost 2 %: for full 4096
// at depth 128, an H200 took 1165 us ordered and 1140 us unordered.
template <class T>
Error BackwardOf(Device stream, const PreparationArguments& known, const Gradients& gradients) {
  const Problem& p = known.problem;
  JAXOPS_RETURN_IF_ERROR(LaunchPreparation<T>(stream, known));
  JAXOPS_RETURN_IF_ERROR(
      FromCuda(kHandler, attention::LaunchReach(stream, p, known.sums.reach, known.sums.block_size, KeysOfBlock(p))));
  if (gradients.dbias) JAXOPS_RETURN_IF_ERROR(LaunchBiasGradient<T>(stream, known, gradients));
  const auto launch = [&]<bool kGeneral> {
    if (p.depth <= 64) return LaunchBackward<BackwardTile<T, 64, kGeneral>>(stream, known, gradients);
    if (p.depth <= 128) return LaunchBackward<BackwardTile<T, 128, kGeneral>>(stream, known, gradients);
    return LaunchWideBackward<attention::WideTile<T, kGeneral>>(stream, known, gradients);
  };
  if (p.is_general() || known.sums.reach.decides) JAXOPS_RETURN_IF_ERROR(launch.template operator()<true>());
  if (!p.is_general()) JAXOPS_RETURN_IF_ERROR(launch.template operator()<false>());
  if (p.depth > 128) return Error::Success();
  return p.depth <= 64 ? LaunchFinish<T, 64>(stream, known, gradients) : LaunchFinish<T, 128>(stream, known, gradients);
}

// Parts of the workspace, each aligned to 16 bytes; jaxops/ops/_attention_support.py knows the size.
Error DivideWorkspace(const Problem& p, const AnyBuffer& workspace, BackwardSums* sums) {
  const int64_t heads = int64_t{p.batches} * p.heads;
  sums->block_size = attention::QueriesAtOnce(p.depth <= 64 ? 64 : 128);
  sums->blocks = static_cast<int>(CeilDiv(p.queries, sums->block_size));
  // A mask with a row per query is usually causal.
  sums->descending = p.right < attention::kLongest || (p.mask_has_reach() && p.mask.query_stride);
  int64_t words = 0;
  const auto take = [&](int64_t count) {
    int32_t* const part = Data<int32_t>(workspace) + words;
    words += CeilDiv(count, 4) * 4;
    return part;
  };
  const bool wide = p.depth > 128;  // nothing is summed in memory then
  if (!wide) sums->dq = reinterpret_cast<float*>(take(heads * sums->blocks * 2 * attention::kPartFloats));
  sums->statistics = reinterpret_cast<float*>(take(heads * sums->blocks * sums->block_size * 2));
  sums->turns = take(heads * sums->blocks * 2);
  sums->tickets = take(2);
  sums->reach = attention::TakeReach(p, take, sums->tickets + 1, sums->block_size, KeysOfBlock(p));
  return attention::CheckWorkspace(kHandler, workspace, words);
}

// q, k, v, out, lse, dout, [dlse], the options' operands, [maximum, log_sum] -> dq, dk, dv, [dbias]; if q, k and v are
// one tensor, dq is the gradient of all three, and dk and dv are absent. Up to depth 128, dk and dv may have all heads,
// in f32.
Error AttentionBackward(Device stream, AnyBuffer q, AnyBuffer k, AnyBuffer v, AnyBuffer out, AnyBuffer lse,
                        AnyBuffer dout, ffi::RemainingArgs rest, BufferResult dq, ffi::RemainingRets more,
                        BackwardOptions options) {
  for (const AnyBuffer& buffer : {q, k, v, out, lse, dout, *dq}) JAXOPS_RETURN_IF_ERROR(CheckBuffer(kHandler, buffer));
  BufferReader<ffi::RemainingArgs> operands(kHandler, rest);
  std::optional<AnyBuffer> dlse;
  if (options.has_dlse) JAXOPS_RETURN_IF_ERROR(operands.Take(&dlse));
  BufferReader<ffi::RemainingRets> results(kHandler, more);
  std::optional<AnyBuffer> dk = *dq, dv = *dq, dbias, workspace;
  if (q.dimensions().size() == 4) {
    JAXOPS_RETURN_IF_ERROR(results.Take(&dk));
    JAXOPS_RETURN_IF_ERROR(results.Take(&dv));
  }
  if (options.wants_dbias) JAXOPS_RETURN_IF_ERROR(results.Take(&dbias));
  JAXOPS_RETURN_IF_ERROR(results.Take(&workspace));
  JAXOPS_RETURN_IF_ERROR(results.End());
  if (options.wants_dbias && !options.has_bias) return Invalid(kHandler, "dbias is wanted, but there is no bias");
  PreparationArguments known = {};
  Problem& p = known.problem;
  JAXOPS_RETURN_IF_ERROR(attention::ParseProblem(kHandler, q, k, v, options, &operands, &p));
  JAXOPS_RETURN_IF_ERROR(attention::ParseParts(kHandler, &operands, options, &p));
  JAXOPS_RETURN_IF_ERROR(operands.End());
  const DataType type = q.element_type();
  const int64_t batches = p.batches, queries = p.queries, keys = p.keys, heads = p.heads, key_heads = p.key_heads;
  const int64_t depth = p.depth;
  bool apart = false;
  for (const auto& [name, buffer] : {std::pair("out", out), std::pair("dout", dout)})
    JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, name, buffer, type, {batches, queries, heads, depth}));
  if (p.joint) {
    JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "dq", *dq, type, {batches, queries, heads, 3, depth}));
  } else {
    JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "dq", *dq, type, {batches, queries, heads, depth}));
    apart = depth <= 128 && heads != key_heads && HasShape(*dk, {batches, keys, heads, depth});
    for (const auto& [name, buffer] : {std::pair("dk", *dk), std::pair("dv", *dv)})
      JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, name, buffer, apart ? DataType::F32 : type,
                                        {batches, keys, apart ? heads : key_heads, depth}));
  }
  JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "lse", lse, DataType::F32, {batches, heads, queries}));
  if (dlse) JAXOPS_RETURN_IF_ERROR(CheckShape(kHandler, "dlse", *dlse, DataType::F32, {batches, heads, queries}));
  for (const AnyBuffer& buffer : {q, k, v, out, dout, *dq, *dk, *dv})
    JAXOPS_RETURN_IF_ERROR(CheckStart(kHandler, buffer.untyped_data()));
  if (dbias) JAXOPS_RETURN_IF_ERROR(CheckStart(kHandler, dbias->untyped_data()));
  if (CompiledCapability() != kHopper)
    return Error(ffi::ErrorCode::kUnimplemented, "attention_bwd: this GPU has no wgmma");
  const bool rounded = dbias && dbias->element_type() == type;
  if (dbias) {
    JAXOPS_RETURN_IF_ERROR(CheckShape(
        kHandler, "dbias", *dbias, rounded ? type : DataType::F32,
        {p.bias.batch_stride ? batches : 1, p.bias.head_stride ? heads : 1, p.bias.query_stride ? queries : 1, keys}));
  }
  JAXOPS_RETURN_IF_ERROR(DivideWorkspace(p, *workspace, &known.sums));
  known.out = out.untyped_data();
  known.dout = dout.untyped_data();
  known.lse = Data<float>(lse);
  known.dlse = dlse ? Data<float>(*dlse) : nullptr;
  const Gradients gradients = {dq->untyped_data(),
                               p.PartOf(dk->untyped_data(), 1),
                               p.PartOf(dv->untyped_data(), 2),
                               apart,
                               dbias ? dbias->untyped_data() : nullptr,
                               rounded};
  return attention::VisitType(kHandler, type, [&]<class T> {
    JAXOPS_RETURN_IF_ERROR(BackwardOf<T>(stream, known, gradients));
    if (!options.unseen_mean) return Error::Success();
    return FromCuda(kHandler,
                    apart ? attention::LaunchSpread<T, float>(stream, p, known.lse, known.dout, gradients.dv, p.heads)
                          : attention::LaunchSpread<T, T>(stream, p, known.lse, known.dout, gradients.dv, p.key_heads));
  });
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
                   .RemainingRets()
                   .Attrs<jaxops::BackwardOptions>());
