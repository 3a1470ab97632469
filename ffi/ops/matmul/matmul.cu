#include <optional>

#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/few_rows.cuh"
#include "ops/matmul/mma.cuh"
#include "ops/matmul/operand_copy.cuh"
#include "ops/matmul/simt.cuh"
#include "ops/matmul/wgmma.h"

namespace jaxops {
namespace {

using hopper::E4M3;
using hopper::E5M2;
using matmul::MatrixStack;
using matmul::Problem;
using matmul::SplitOperand;
using matmul::WgmmaOperand;
using matmul::WgmmaPlan;

template <class T>
inline constexpr DataType kOperandType = kDataType<T>;
template <>
inline constexpr DataType kOperandType<E4M3> = DataType::F8E4M3FN;
template <>
inline constexpr DataType kOperandType<E5M2> = DataType::F8E5M2;

template <class T_, class V_>
struct OperandPair {
  using T = T_;
  using V = V_;
};
using WgmmaOperands =
    Types<OperandPair<__nv_bfloat16, __nv_bfloat16>, OperandPair<__half, __half>, OperandPair<float, float>,
          OperandPair<E4M3, E4M3>, OperandPair<E4M3, E5M2>, OperandPair<E5M2, E4M3>, OperandPair<E5M2, E5M2>>;

// The kernels that run on every GPU take operands with one dtype; the result may be f32.
using GeneralPairs = Types<Pair<__nv_bfloat16, __nv_bfloat16>, Pair<__nv_bfloat16, float>, Pair<__half, __half>,
                           Pair<__half, float>, Pair<float, float>>;

// How an operand for the tensor cores' kernel is copied first; kNone: the copy engine or threads load it. The order is
// part of the calling convention.
enum class OperandCopy : int32_t { kNone, kAsItLies, kTransposed, kCount };

// The attributes that say how the product is computed: jaxops/ops/_matmul_choice.py chooses them.
struct Choice {
  int32_t tile_rows, tile_columns;  // 0 rows: a kernel for every GPU; kFewRows: the kernel for few rows
  bool ping_pong;
  int32_t band;
  matmul::SharedOperand shared;
  bool in_parts;
  int32_t splits, promote;
  OperandCopy lhs_copy, rhs_copy;
};

// The results in order: out, then the given ones among preactivation, lhs copy, rhs copy and partials; for products in
// parts also lhs scales, rhs scales and flags (SplitOperands).
struct MoreResults {
  std::optional<AnyBuffer> preactivation, lhs_copy, rhs_copy, partials, lhs_scales, rhs_scales, flags;
};

constexpr const char* kHandler = "matmul";

Error General(Device stream, const Problem& problem, DataType operands, DataType result) {
  return First(
      GeneralPairs{},
      Error(ffi::ErrorCode::kUnimplemented,
            "matmul: no kernel for these element types on this GPU. Hopper's need a build with "
            "JAXOPS_CUDA_ARCHITECTURES=90a"),
      [=]<class P> { return operands == kDataType<typename P::Input> && result == kDataType<typename P::Output>; },
      [&]<class P> {
        using T = typename P::Input;
        if constexpr (sizeof(T) == 2) {
          return FromCuda(kHandler, matmul::LaunchMma<T, typename P::Output>(stream, problem));
        } else {
          return FromCuda(kHandler, matmul::LaunchSimt(stream, problem));
        }
      });
}

Error FewRows(Device stream, const Problem& problem, DataType operands, DataType result, int tile_columns) {
  const cudaError_t status = First(
      Types<__nv_bfloat16, __half>{}, cudaErrorNotSupported,
      [=]<class T> { return operands == kDataType<T> && (result == kDataType<T> || result == DataType::F32); },
      [&]<class T> { return matmul::LaunchFewRows<T>(stream, problem, result == DataType::F32, tile_columns); });
  return status == cudaErrorNotSupported ? General(stream, problem, operands, result) : FromCuda(kHandler, status);
}

// An operand's matrices as they lie in memory.
MatrixStack AsTheyLie(const AnyBuffer& source, bool transposed, int64_t rows, int64_t columns) {
  if (transposed) std::swap(rows, columns);
  return {source.untyped_data(), static_cast<int64_t>(source.element_count()) / (rows * columns), rows, columns};
}

// Whether the workspaces have the shapes and dtypes that the choice implies.
Error CheckWorkspaces(const AnyBuffer& lhs, const AnyBuffer& rhs, const Problem& p, const Choice& choice,
                      const MoreResults& results) {
  const auto check_copy = [&](const char* name, const AnyBuffer& source, const MatrixStack& from, bool along_k,
                              OperandCopy how, const std::optional<AnyBuffer>& copy,
                              const std::optional<AnyBuffer>& scales) {
    const bool turned = how == OperandCopy::kTransposed;
    if (choice.in_parts && (how == OperandCopy::kNone || turned == along_k))
      return Invalid(kHandler, "products in parts need copies along k");
    if (how == OperandCopy::kNone) return Error::Success();
    const int64_t rows = turned ? from.columns : from.rows, columns = turned ? from.rows : from.columns;
    const auto shape = copy->dimensions();
    const bool fits = copy->element_type() == source.element_type() && shape.size() == 3 && shape[1] == rows;
    if (!choice.in_parts) {
      if (fits && shape[0] == from.slices && shape[2] >= columns &&
          shape[2] * ffi::ByteWidth(source.element_type()) % 16 == 0) {
        return Error::Success();
      }
    } else if (fits && shape[0] == from.slices * matmul::kSplitSlices &&
               shape[2] == (columns + matmul::kSplitBlock - 1) / matmul::kSplitBlock * matmul::kSplitBlock) {
      const int64_t blocks[] = {from.slices, (rows + matmul::kSplitBlock - 1) / matmul::kSplitBlock,
                                shape[2] / matmul::kSplitBlock};
      const auto of_scales = scales->dimensions();
      if (scales->element_type() == DataType::F32 &&
          std::equal(of_scales.begin(), of_scales.end(), std::begin(blocks), std::end(blocks))) {
        return Error::Success();
      }
    }
    return Invalid(kHandler, std::string("the copy of ") + name + " has another shape or dtype than its place");
  };
  JAXOPS_RETURN_IF_ERROR(check_copy("lhs", lhs, AsTheyLie(lhs, p.lhs_transposed, p.m, p.k), !p.lhs_transposed,
                                    choice.lhs_copy, results.lhs_copy, results.lhs_scales));
  JAXOPS_RETURN_IF_ERROR(check_copy("rhs", rhs, AsTheyLie(rhs, p.rhs_transposed, p.k, p.n), p.rhs_transposed,
                                    choice.rhs_copy, results.rhs_copy, results.rhs_scales));
  if (results.partials) {
    const auto shape = results.partials->dimensions();
    if (results.partials->element_type() != DataType::F32 || shape.size() != 4 || shape[0] != choice.splits ||
        shape[1] != p.batches || shape[2] != p.m || shape[3] != p.n) {
      return Invalid(kHandler, "the partial results' shape or dtype is off: " + Describe(shape));
    }
  }
  if (choice.in_parts && lhs.element_type() != DataType::F32)
    return Invalid(kHandler, "only f32 is multiplied in parts");
  const int64_t k_tiles = (p.k + matmul::kSplitBlock - 1) / matmul::kSplitBlock;
  if (results.flags && (results.flags->element_type() != DataType::S32 ||
                        static_cast<int64_t>(results.flags->element_count()) != 3 + k_tiles)) {
    return Invalid(kHandler, "products in parts need an int32 flag, one for each k tile, and two exponents");
  }
  return Error::Success();
}

// Describes an operand, and enqueues its copy if the choice asks for one.
template <class T>
Error PrepareOperand(Device stream, const MatrixStack& from, bool transposed, OperandCopy how,
                     const std::optional<AnyBuffer>& copy, WgmmaOperand* operand) {
  if (how == OperandCopy::kNone) {
    *operand = {from.data, transposed, from.slices, from.columns};
    // The array is aligned to 16 bytes; its rows are aligned to 16 for the copy engine, and to 4 or 8 for threads'
    // pieces.
    constexpr int64_t kLeast = sizeof(T) == 2 ? 4 : 16;
    const int64_t row_bytes = from.columns * static_cast<int64_t>(sizeof(T));
    if (row_bytes % kLeast != 0)
      return Invalid(kHandler, "rows that are not aligned to " + std::to_string(kLeast) + " bytes need a copy");
    if (row_bytes % 16 != 0) operand->piece = row_bytes % 8 == 0 ? 8 : 4;
    return Error::Success();
  }
  const bool turned = how == OperandCopy::kTransposed;
  const int64_t stride = copy->dimensions()[2];
  void* const to = copy->untyped_data();
  cudaError_t status = cudaErrorNotSupported;
  if (!turned) {
    status = matmul::LaunchPadRows(stream, from, sizeof(T), to, stride);
  } else if constexpr (sizeof(T) != 2) {
    status = matmul::LaunchTranspose<std::conditional_t<sizeof(T) == 1, uint8_t, T>>(stream, from, to, stride);
  }
  *operand = {to, transposed != turned, from.slices, stride};
  return FromCuda(kHandler, status);
}

// As above, for an operand in parts, which LaunchSplit writes.
SplitOperand PrepareParts(const MatrixStack& from, bool transposed, OperandCopy how, const AnyBuffer& copy,
                          const AnyBuffer& scales, WgmmaOperand* operand) {
  const bool turned = how == OperandCopy::kTransposed;
  const SplitOperand split = {from, turned, Data<float>(copy), copy.dimensions()[2], Data<float>(scales)};
  *operand = {split.parts, transposed != turned, copy.dimensions()[0], split.stride, split.scales};
  return split;
}

template <class T, class V>
Error OnTensorCores(Device stream, const AnyBuffer& lhs, const AnyBuffer& rhs, const Problem& problem,
                    const Choice& choice, const MoreResults& results, bool wide_out) {
  WgmmaPlan plan = {};
  plan.tile_rows = choice.tile_rows;
  plan.tile_columns = choice.tile_columns;
  plan.ping_pong = choice.ping_pong;
  plan.band = choice.band;
  plan.shared = choice.shared;
  plan.in_parts = choice.in_parts;
  plan.promote = choice.promote;
  plan.wide_out = wide_out;
  plan.splits = choice.splits;
  if (results.partials) plan.partials = Data<float>(*results.partials);
  const MatrixStack left = AsTheyLie(lhs, problem.lhs_transposed, problem.m, problem.k);
  const MatrixStack right = AsTheyLie(rhs, problem.rhs_transposed, problem.k, problem.n);
  int32_t* flags = nullptr;
  if (choice.in_parts) {
    flags = Data<int32_t>(*results.flags);
    const SplitOperand parts[] = {
        PrepareParts(left, problem.lhs_transposed, choice.lhs_copy, *results.lhs_copy, *results.lhs_scales, &plan.lhs),
        PrepareParts(right, problem.rhs_transposed, choice.rhs_copy, *results.rhs_copy, *results.rhs_scales,
                     &plan.rhs)};
    JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, matmul::LaunchSplit(stream, parts[0], parts[1], flags)));
  } else {
    JAXOPS_RETURN_IF_ERROR(
        PrepareOperand<T>(stream, left, problem.lhs_transposed, choice.lhs_copy, results.lhs_copy, &plan.lhs));
    JAXOPS_RETURN_IF_ERROR(
        PrepareOperand<V>(stream, right, problem.rhs_transposed, choice.rhs_copy, results.rhs_copy, &plan.rhs));
  }
  plan.unfit = flags;
  const cudaError_t status = matmul::LaunchWgmma<T, V>(stream, problem, plan);
  if (status == cudaErrorNotSupported)  // no such tile, or none for rows with this layout
    return General(stream, problem, kOperandType<T>, wide_out ? DataType::F32 : kOperandType<T>);
  JAXOPS_RETURN_IF_ERROR(FromCuda(kHandler, status));
  if constexpr (std::is_same_v<T, float>) {
    if (flags) {  // operands that no parts hold, or sums that might overflow
      Problem guarded = problem;
      guarded.only_if = flags;
      return FromCuda(kHandler, matmul::LaunchSimt(stream, guarded));
    }
  }
  return Error::Success();
}

// lhs, rhs, [scale], [bias] -> out, and more as in MoreResults
Error Matmul(Device stream, AnyBuffer lhs, AnyBuffer rhs, ffi::RemainingArgs rest, BufferResult out,
             ffi::RemainingRets more, bool lhs_transposed, bool rhs_transposed, int32_t activation, int32_t triangle,
             bool has_scale, bool has_preactivation, int32_t tile_rows, int32_t tile_columns, bool ping_pong,
             int32_t band, int32_t shared, bool in_parts, int32_t splits, int32_t promote, int32_t lhs_copy,
             int32_t rhs_copy, bool has_partials) {
  constexpr int32_t kCopies = static_cast<int32_t>(OperandCopy::kCount);
  if (lhs_copy < 0 || lhs_copy >= kCopies || rhs_copy < 0 || rhs_copy >= kCopies || band < 1 || splits < 1 ||
      promote < 0 || shared < 0 || shared >= static_cast<int32_t>(matmul::SharedOperand::kCount) ||
      (splits > 8 && !has_partials) || band > 64 || tile_rows < 0 || tile_columns < 0 ||
      (tile_rows == 0) != (tile_columns == 0)) {
    return Invalid(kHandler, "attributes out of range");  // 64 bands of tile columns must fit 32 bits
  }
  const Choice choice = {tile_rows,
                         tile_columns,
                         ping_pong,
                         band,
                         static_cast<matmul::SharedOperand>(shared),
                         in_parts,
                         splits,
                         promote,
                         static_cast<OperandCopy>(lhs_copy),
                         static_cast<OperandCopy>(rhs_copy)};
  MoreResults results;
  for (const AnyBuffer& buffer : {lhs, rhs, *out}) JAXOPS_RETURN_IF_ERROR(CheckBuffer(kHandler, buffer));
  std::optional<AnyBuffer> scale, bias;
  BufferReader<ffi::RemainingArgs> operands(kHandler, rest);
  if (has_scale) JAXOPS_RETURN_IF_ERROR(operands.Take(&scale));
  if (rest.size() > has_scale) JAXOPS_RETURN_IF_ERROR(operands.Take(&bias));
  JAXOPS_RETURN_IF_ERROR(operands.End());
  BufferReader<ffi::RemainingRets> reader(kHandler, more);
  for (const auto& [present, result] :
       {std::pair(has_preactivation, &results.preactivation), std::pair(lhs_copy != 0, &results.lhs_copy),
        std::pair(rhs_copy != 0, &results.rhs_copy), std::pair(has_partials, &results.partials),
        std::pair(in_parts, &results.lhs_scales), std::pair(in_parts, &results.rhs_scales),
        std::pair(in_parts, &results.flags)}) {
    if (!present) continue;
    JAXOPS_RETURN_IF_ERROR(reader.Take(result));
    if (!IsAligned((*result)->untyped_data()) && result != &results.preactivation)
      return Invalid(kHandler, "a workspace is not 16-byte aligned");
  }
  JAXOPS_RETURN_IF_ERROR(reader.End());
  const DataType lhs_type = lhs.element_type(), rhs_type = rhs.element_type(), result = out->element_type();
  const auto is_8bit = [](DataType type) { return type == DataType::F8E4M3FN || type == DataType::F8E5M2; };
  if (lhs_type != rhs_type && !(is_8bit(lhs_type) && is_8bit(rhs_type)))
    return Invalid(kHandler, "the operands' dtypes differ");
  if (scale) JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "scale", *scale, DataType::F32));
  if (bias) JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "bias", *bias, DataType::F32));
  Problem problem = {};
  JAXOPS_RETURN_IF_ERROR(matmul::ParseProblem(kHandler, lhs, rhs, scale ? &*scale : nullptr, bias ? &*bias : nullptr,
                                              *out, results.preactivation ? &*results.preactivation : nullptr,
                                              lhs_transposed, rhs_transposed, activation, triangle, &problem));
  if (problem.m * problem.n * problem.batches == 0) return Error::Success();
  JAXOPS_RETURN_IF_ERROR(CheckStart(kHandler, problem.out));
  JAXOPS_RETURN_IF_ERROR(CheckStart(kHandler, problem.preactivation));
  if (problem.k > 0) {
    const int64_t depth_bytes = problem.k * static_cast<int64_t>(ffi::ByteWidth(lhs_type));
    const int64_t tile_bytes = hopper::kBoxRowBytes * (in_parts ? 2 : 1);
    if (splits > (depth_bytes + tile_bytes - 1) / tile_bytes)
      return Invalid(kHandler, "k is split in more parts than it has tiles");
    JAXOPS_RETURN_IF_ERROR(CheckWorkspaces(lhs, rhs, problem, choice, results));
  }
  // A slice from a larger array may begin anywhere; the copy engine takes only aligned ones.
  const auto fits = [](const AnyBuffer& operand, int32_t copy) {
    return copy != 0 || IsAligned(operand.untyped_data());
  };
  if (tile_rows == 0 || problem.k == 0 || !fits(lhs, lhs_copy) || !fits(rhs, rhs_copy) ||
      CompiledCapability() != kHopper)
    return General(stream, problem, problem.k == 0 ? result : lhs_type, result);  // if k = 0, nothing is read
  if (tile_rows == matmul::kFewRows) return FewRows(stream, problem, lhs_type, result, tile_columns);
  return First(
      WgmmaOperands{}, Invalid(kHandler, "no tensor core kernel for these element types"),
      [=]<class P> {
        using T = typename P::T;
        return lhs_type == kOperandType<T> && rhs_type == kOperandType<typename P::V> &&
               (result == DataType::F32 || result == kOperandType<matmul::WgmmaResult<T>>);
      },
      [&]<class P> {
        return OnTensorCores<typename P::T, typename P::V>(stream, lhs, rhs, problem, choice, results,
                                                           result == DataType::F32);
      });
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(matmul, jaxops::Matmul,
               Arg<jaxops::AnyBuffer>()
                   .Arg<jaxops::AnyBuffer>()
                   .RemainingArgs()
                   .Ret<jaxops::AnyBuffer>()
                   .RemainingRets()
                   .Attr<bool>("lhs_transposed")
                   .Attr<bool>("rhs_transposed")
                   .Attr<int32_t>("activation")
                   .Attr<int32_t>("triangle")
                   .Attr<bool>("has_scale")
                   .Attr<bool>("has_preactivation")
                   .Attr<int32_t>("tile_rows")
                   .Attr<int32_t>("tile_columns")
                   .Attr<bool>("ping_pong")
                   .Attr<int32_t>("band")
                   .Attr<int32_t>("shared")
                   .Attr<bool>("in_parts")
                   .Attr<int32_t>("splits")
                   .Attr<int32_t>("promote")
                   .Attr<int32_t>("lhs_copy")
                   .Attr<int32_t>("rhs_copy")
                   .Attr<bool>("has_partials"));
