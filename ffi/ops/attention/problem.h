// Attention, checked and reduced to the values that its kernels need:
//   out = softmax(masked(cap(scale q k^T) + bias)) v, cap(x) = soft_cap tanh(x / soft_cap), for each batch and head.
#ifndef JAXOPS_OPS_ATTENTION_PROBLEM_H_
#define JAXOPS_OPS_ATTENTION_PROBLEM_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "core/handler.h"
#include "core/row_shape.h"
#include "core/shape.h"

namespace jaxops::attention {

// The longest queries and keys, and a distance that bounds nothing; a sum of several fits an int.
inline constexpr int kLongest = 1 << 29;
inline constexpr int kDeepest = 256;

// An operand [batches or 1, heads or 1, queries or 1, keys]; stride 0 if it broadcasts.
struct Broadcast {
  const void* data = nullptr;  // null: absent
  int64_t batch_stride = 0, head_stride = 0, query_stride = 0;

  JAXOPS_HOST_DEVICE int64_t Row(int batch, int head, int query) const {
    return batch * batch_stride + head * head_stride + query * query_stride;
  }
};

struct Problem {
  int batches, queries, keys, heads, key_heads, depth;
  const void *q, *k, *v;  // [batches, queries or keys, heads or key_heads, depth]
  bool joint;             // q, k and v are one tensor [batches, queries, heads, 3, depth], and so are their gradients
  void* out;              // [batches, queries, heads, depth]
  float* lse;             // [batches, heads, queries]: log of the sum of a row's exponentials; -inf if it sees nothing
  // Shaped like lse, or null: lse in two parts, in units of log 2. If the maximum is -1e9, lse alone has lost the sum's
  // logarithm. If the maximum is not huge, the first part is lse and the second is 0.
  float *maximum, *log_sum;
  float scale, soft_cap;  // soft_cap: 0 without one
  int left, right;        // query i sees the keys j with i - left <= j <= i + right
  Broadcast bias, mask;   // mask: 1-byte booleans, true if the key is seen
  bool wide_bias;         // the bias is f32; else it has q's dtype
  // [batches]: positions from this one on neither see nor are seen; [batches, queries or keys]: positions with equal
  // ids see each other.
  const int32_t *query_lengths, *key_lengths, *query_segments, *key_segments;
  const int32_t* query_offset;  // [1]: added to the queries' positions; null: 0
  const float* sinks;           // [heads], or [batches, heads] with a stride: one more logit each row
  int sinks_stride;

  JAXOPS_HOST_DEVICE int group() const { return heads / key_heads; }
  // Elements from one head to the next in q, k or v.
  JAXOPS_HOST_DEVICE int head_stride() const { return joint ? 3 * depth : depth; }
  // Where part `index` begins if q, k and v are one tensor; else the tensor itself.
  template <class Pointer>
  Pointer PartOf(Pointer data, int index) const {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
    return joint ? static_cast<Byte*>(data) + 2 * index * depth : data;
  }
  // Whether scores need more than `scale`, and masks more than position ranges.
  bool is_general() const { return soft_cap != 0 || bias.data || !(scale > 0) || (mask.data && !mask_has_reach()); }
  // Whether the mask gives ranges of keys and queries: not beside segments, nor if single heads share a key head.
  bool mask_has_reach() const { return mask.data && !query_segments && (!mask.head_stride || group() == 1); }
  JAXOPS_HOST_DEVICE int QueriesOf(int batch) const { return LengthOf(query_lengths, batch, queries); }
  JAXOPS_HOST_DEVICE int KeysOf(int batch) const { return LengthOf(key_lengths, batch, keys); }

 private:
  static JAXOPS_HOST_DEVICE int LengthOf(const int32_t* lengths, int batch, int most) {
    if (!lengths) return most;
    const int length = lengths[batch];
    return length < 0 ? 0 : length < most ? length : most;
  }
};

// A call's attributes, as they come.
struct Options {
  float scale;
  bool causal;
  int64_t causal_offset, window_left, window_right;  // windows: -1 for none
  float soft_cap;
  bool has_bias, has_mask, has_query_lengths, has_key_value_lengths, has_segments, has_sinks, has_query_offset;
  bool has_parts;    // of lse: the forward pass's results, the backward pass's operands
  bool unseen_mean;  // a query that sees no key gets the mean of all values; otherwise 0
};
// As they are decoded, in that order.
#define JAXOPS_ATTENTION_OPTIONS                                                                                    \
  StructMember<float>("scale"), StructMember<bool>("causal"), StructMember<int64_t>("causal_offset"),               \
      StructMember<int64_t>("window_left"), StructMember<int64_t>("window_right"), StructMember<float>("soft_cap"), \
      StructMember<bool>("has_bias"), StructMember<bool>("has_mask"), StructMember<bool>("has_query_lengths"),      \
      StructMember<bool>("has_key_value_lengths"), StructMember<bool>("has_segments"),                              \
      StructMember<bool>("has_sinks"), StructMember<bool>("has_query_offset"), StructMember<bool>("has_parts"),     \
      StructMember<bool>("unseen_mean")

// Whether a tensor [batches, queries, heads, keys] broadcasts to the scores, and how.
inline Error ParseBroadcast(const char* handler, const char* name, const AnyBuffer& buffer, const Problem& p,
                            Broadcast* out) {
  const auto dims = buffer.dimensions();
  if (dims.size() != 4 || (dims[0] != 1 && dims[0] != p.batches) || (dims[1] != 1 && dims[1] != p.heads) ||
      (dims[2] != 1 && dims[2] != p.queries) || dims[3] != p.keys) {
    return Invalid(handler, std::string(name) + " has shape " + Describe(dims) + ", which does not broadcast to [" +
                                std::to_string(p.batches) + ", " + std::to_string(p.heads) + ", " +
                                std::to_string(p.queries) + ", " + std::to_string(p.keys) + "]");
  }
  out->data = buffer.untyped_data();
  out->query_stride = dims[2] == 1 ? 0 : dims[3];
  out->head_stride = dims[1] == 1 ? 0 : dims[2] * dims[3];
  out->batch_stride = dims[0] == 1 ? 0 : dims[1] * dims[2] * dims[3];
  return Error::Success();
}

inline int Clamped(int64_t distance) { return static_cast<int>(std::clamp<int64_t>(distance, -kLongest, kLongest)); }

// Parses q, k, v and the operands that the options announce. If all three are one tensor [batches, queries, heads, 3,
// depth], q, k and v are its parts.
inline Error ParseProblem(const char* handler, const AnyBuffer& q, const AnyBuffer& k, const AnyBuffer& v,
                          const Options& options, BufferReader<ffi::RemainingArgs>* rest, Problem* problem) {
  Problem& p = *problem;
  p = {};
  const DataType type = q.element_type();
  if (type != DataType::BF16 && type != DataType::F16) return Invalid(handler, "q must be bf16 or f16");
  p.joint = q.dimensions().size() == 5;
  if (p.joint) {
    for (const AnyBuffer& other : {k, v})
      if (other.untyped_data() != q.untyped_data() || other.dimensions().size() != 5)
        return Invalid(handler, "q, k and v must be one tensor if q has five axes");
    if (q.dimensions()[3] != 3)
      return Invalid(handler, "a joint q, k and v must have shape [batches, queries, heads, 3, depth], got " +
                                  Describe(q.dimensions()));
  } else if (q.dimensions().size() != 4 || k.dimensions().size() != 4) {
    return Invalid(handler, "q, k and v must have four axes");
  }
  const auto sizes = [](const AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    return std::array<int64_t, 4>{dims[0], dims[1], dims[2], dims[dims.size() - 1]};
  };
  const std::array<int64_t, 4> of_q = sizes(q), of_k = sizes(k);
  for (const int64_t size : {of_q[0], of_q[1], of_q[2], of_k[1], of_k[2]})
    if (size < 1 || size > kLongest)
      return Invalid(handler, "sizes must be from 1 to 2^29, got q " + Describe(q.dimensions()) + " and k " +
                                  Describe(k.dimensions()));
  if (of_q[3] < 8 || of_q[3] > kDeepest || of_q[3] % 8 != 0)
    return Invalid(handler, "the depth must be a multiple of 8 up to 256, got " + std::to_string(of_q[3]));
  if (of_q[2] % of_k[2] != 0)
    return Invalid(handler, std::to_string(of_q[2]) + " heads are no multiple of " + std::to_string(of_k[2]));
  p.batches = static_cast<int>(of_q[0]);
  p.queries = static_cast<int>(of_q[1]);
  p.heads = static_cast<int>(of_q[2]);
  p.depth = static_cast<int>(of_q[3]);
  p.keys = static_cast<int>(of_k[1]);
  p.key_heads = static_cast<int>(of_k[2]);
  if (!p.joint) {
    JAXOPS_RETURN_IF_ERROR(CheckShape(handler, "k", k, type, {of_q[0], of_k[1], of_k[2], of_q[3]}));
    JAXOPS_RETURN_IF_ERROR(CheckShape(handler, "v", v, type, {of_q[0], of_k[1], of_k[2], of_q[3]}));
  }
  p.q = q.untyped_data();
  p.k = p.PartOf(k.untyped_data(), 1);
  p.v = p.PartOf(v.untyped_data(), 2);
  // A window moves along with the diagonal.
  const int64_t offset = options.causal_offset;
  if (options.window_left < -1 || options.window_right < -1 || offset < -kLongest || offset > kLongest)
    return Invalid(handler, "window_left and window_right must be at least -1, and |causal_offset| at most 2^29");
  p.left = options.window_left < 0 ? kLongest : Clamped(options.window_left - offset);
  p.right = options.window_right < 0 ? kLongest : Clamped(options.window_right + offset);
  if (options.causal) p.right = std::min(p.right, Clamped(offset));
  p.scale = options.scale;
  p.soft_cap = options.soft_cap;
  if (!(p.soft_cap >= 0)) return Invalid(handler, "soft_cap must not be negative");

  std::optional<AnyBuffer> operand;
  if (options.has_bias) {
    JAXOPS_RETURN_IF_ERROR(rest->Take(&operand));
    p.wide_bias = operand->element_type() == DataType::F32;
    if (!p.wide_bias) JAXOPS_RETURN_IF_ERROR(CheckType(handler, "bias", *operand, type));
    JAXOPS_RETURN_IF_ERROR(ParseBroadcast(handler, "bias", *operand, p, &p.bias));
  }
  if (options.has_mask) {
    JAXOPS_RETURN_IF_ERROR(rest->Take(&operand));
    JAXOPS_RETURN_IF_ERROR(CheckType(handler, "mask", *operand, DataType::PRED));
    JAXOPS_RETURN_IF_ERROR(ParseBroadcast(handler, "mask", *operand, p, &p.mask));
  }
  const auto take_ints = [&](bool present, const char* name, std::initializer_list<int64_t> shape,
                             const int32_t** out) -> Error {
    if (!present) return Error::Success();
    JAXOPS_RETURN_IF_ERROR(rest->Take(&operand));
    *out = static_cast<const int32_t*>(operand->untyped_data());
    return CheckShape(handler, name, *operand, DataType::S32, shape);
  };
  const bool segments = options.has_segments;
  JAXOPS_RETURN_IF_ERROR(take_ints(options.has_query_lengths, "query_lengths", {of_q[0]}, &p.query_lengths));
  JAXOPS_RETURN_IF_ERROR(take_ints(options.has_key_value_lengths, "key_value_lengths", {of_q[0]}, &p.key_lengths));
  JAXOPS_RETURN_IF_ERROR(take_ints(segments, "query_segments", {of_q[0], of_q[1]}, &p.query_segments));
  JAXOPS_RETURN_IF_ERROR(take_ints(segments, "key_value_segments", {of_q[0], of_k[1]}, &p.key_segments));
  if (options.has_sinks) {
    JAXOPS_RETURN_IF_ERROR(rest->Take(&operand));
    const bool batched = of_q[0] > 1 && operand->element_count() > static_cast<size_t>(of_q[2]);
    JAXOPS_RETURN_IF_ERROR(
        CheckShape(handler, "sinks", *operand, DataType::F32, {batched ? of_q[0] : int64_t{1}, of_q[2]}));
    p.sinks = static_cast<const float*>(operand->untyped_data());
    p.sinks_stride = batched ? p.heads : 0;
  }
  return take_ints(options.has_query_offset, "query_offset", {1}, &p.query_offset);
}

}  // namespace jaxops::attention

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxops::attention::Options, JAXOPS_ATTENTION_OPTIONS);

#endif  // JAXOPS_OPS_ATTENTION_PROBLEM_H_
