// Launch code that both directions share.
#ifndef JAXOPS_OPS_ATTENTION_LAUNCH_CUH_
#define JAXOPS_OPS_ATTENTION_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "hopper/tensor_copy.cuh"
#include "ops/attention/problem.h"

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "wgmma needs sm_90a: for sm_90 the kernels would be empty, and launched on Hopper all the same"
#endif

namespace jaxops::attention {

// Calls visit.operator()<T>() -> Error for q's type.
template <class Visit>
Error VisitType(const char* handler, DataType type, const Visit& visit) {
  return First(
      Types<__nv_bfloat16, __half>{}, Invalid(handler, "q must be bf16 or f16"),
      [=]<class T> { return type == kDataType<T>; }, visit);
}

// Views in boxes with `box_rows` rows: one for q or dq, one for k, v, dk or dv, and one for out or dout.
template <class T>
cudaError_t DescribeHeads(const Problem& p, const void* data, int rows, int heads, int64_t head_stride, int box_rows,
                          CUtensorMap* map) {
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return hopper::Describe(hopper::HeadsView{data, type, p.batches, rows, heads, p.depth, head_stride, box_rows}, map);
}
template <class T>
cudaError_t DescribeQueries(const Problem& p, const void* data, int box_rows, CUtensorMap* map) {
  return DescribeHeads<T>(p, data, p.queries, p.heads, p.head_stride(), box_rows, map);
}
template <class T>
cudaError_t DescribeKeys(const Problem& p, const void* data, int box_rows, CUtensorMap* map) {
  return DescribeHeads<T>(p, data, p.keys, p.key_heads, p.head_stride(), box_rows, map);
}
template <class T>
cudaError_t DescribeResults(const Problem& p, const void* data, int box_rows, CUtensorMap* map) {
  return DescribeHeads<T>(p, data, p.queries, p.heads, p.depth, box_rows, map);
}

// The parts of the bias and the mask that the copy engine can bring, in boxes with box_rows rows; describes their
// tensors if it can.
template <class T>
Fetched DescribeScores(const Problem& p, int box_rows, CUtensorMap* map) {
  const bool is_bias = p.bias.data, is_mask = !is_bias && p.mask.data;
  const Broadcast& from = is_bias ? p.bias : p.mask;
  const int64_t size = is_bias ? 2 : 1, row = p.keys * size, head = p.queries * row;
  if ((!is_bias && !is_mask) || (is_bias && p.wide_bias) || from.query_stride == 0 || row % 16 || !IsAligned(from.data))
    return Fetched::kNothing;
  const auto type = is_mask                     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int64_t heads = from.head_stride ? p.heads : 1, batches = from.batch_stride ? p.batches : 1;
  const cudaError_t status =
      hopper::Encode<4>(map, type, from.data, {p.keys, p.queries, heads, batches}, {row, head, heads * head},
                        {static_cast<int>(hopper::kBoxRowBytes / size), box_rows, 1, 1});
  return status != cudaSuccess ? Fetched::kNothing : is_bias ? Fetched::kBias : Fetched::kMask;
}

// How many of `heads` heads to take together if each reads `bytes` and `budget` fits the L2 cache: groups of about
// equal size, because a single leftover head would be a long tail.
inline int HeadsTogether(int64_t heads, double bytes, double budget, int64_t least, int64_t most) {
  const int64_t fitting = static_cast<int64_t>(budget / bytes);
  const int64_t count = std::min(heads, std::max(least, std::min(most, fitting)));
  const int64_t groups = (heads + count - 1) / count;
  return static_cast<int>((heads + groups - 1) / groups);
}

// How many multiprocessors the current device has; 0 if not known.
inline int Multiprocessors() {
  static PerDevice count;
  return count.Get([] {
    int found = 0;
    return CountMultiprocessors(&found) == cudaSuccess ? found : 0;
  });
}

inline Error CheckWorkspace(const char* handler, const AnyBuffer& workspace, int64_t words) {
  if (workspace.element_type() == DataType::S32 && static_cast<int64_t>(workspace.element_count()) >= words &&
      IsAligned(workspace.untyped_data())) {
    return Error::Success();
  }
  return Invalid(handler, "the workspace must have " + std::to_string(words) +
                              " int32 elements aligned to 16 bytes, got " + Describe(workspace.dimensions()));
}

// Reads lse's parts if the options say so: operands of the backward pass, results of the forward pass.
template <class Buffers>
Error ParseParts(const char* handler, BufferReader<Buffers>* buffers, const Options& options, Problem* problem) {
  if (!options.has_parts) return Error::Success();
  if (!options.has_bias) return Invalid(handler, "lse comes in parts only beside a bias");
  for (auto [name, part] : {std::pair("maximum", &Problem::maximum), std::pair("log_sum", &Problem::log_sum)}) {
    std::optional<AnyBuffer> buffer;
    JAXOPS_RETURN_IF_ERROR(buffers->Take(&buffer));
    JAXOPS_RETURN_IF_ERROR(
        CheckShape(handler, name, *buffer, DataType::F32, {problem->batches, problem->heads, problem->queries}));
    problem->*part = Data<float>(*buffer);
  }
  return Error::Success();
}

// Reads a whole forward call; workspace: the caller checks its size.
inline Error ParseForward(const char* handler, const AnyBuffer& q, const AnyBuffer& k, const AnyBuffer& v,
                          const ffi::RemainingArgs& rest, const AnyBuffer& out, const AnyBuffer& lse,
                          const ffi::RemainingRets& more, const Options& options, Problem* problem,
                          std::optional<AnyBuffer>* workspace) {
  for (const AnyBuffer& buffer : {q, k, v, out, lse}) JAXOPS_RETURN_IF_ERROR(CheckBuffer(handler, buffer));
  BufferReader<ffi::RemainingArgs> operands(handler, rest);
  BufferReader<ffi::RemainingRets> results(handler, more);
  Problem& p = *problem;
  JAXOPS_RETURN_IF_ERROR(ParseProblem(handler, q, k, v, options, &operands, &p));
  JAXOPS_RETURN_IF_ERROR(operands.End());
  JAXOPS_RETURN_IF_ERROR(ParseParts(handler, &results, options, &p));
  JAXOPS_RETURN_IF_ERROR(results.Take(workspace));
  JAXOPS_RETURN_IF_ERROR(results.End());
  const int64_t batches = p.batches, queries = p.queries, heads = p.heads, depth = p.depth;
  JAXOPS_RETURN_IF_ERROR(CheckShape(handler, "out", out, q.element_type(), {batches, queries, heads, depth}));
  JAXOPS_RETURN_IF_ERROR(CheckShape(handler, "lse", lse, DataType::F32, {batches, heads, queries}));
  p.out = out.untyped_data();
  p.lse = Data<float>(lse);
  for (const void* data : {p.q, p.k, p.v, static_cast<const void*>(p.out)})
    JAXOPS_RETURN_IF_ERROR(CheckStart(handler, data));
  if (CompiledCapability() != kHopper)
    return Error(ffi::ErrorCode::kUnimplemented, std::string(handler) + ": this GPU has no wgmma");
  return Error::Success();
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_LAUNCH_CUH_
