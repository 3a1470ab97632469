// Attention from few queries to many keys, compiled separately.
#ifndef JAXOPS_OPS_ATTENTION_DECODE_H_
#define JAXOPS_OPS_ATTENTION_DECODE_H_

#include <cstdint>

#include "core/handler.h"
#include "ops/attention/problem.h"

namespace jaxops::attention {

// The 32-bit words that each part of the keys leaves for the join.
inline int64_t DecodeWords(const Problem& p) { return int64_t{p.batches} * p.queries * p.heads * (p.depth + 2); }

// `partial`: splits x DecodeWords words.
Error LaunchDecode(const char* handler, Device stream, const Problem& problem, DataType type, int splits,
                   float* partial);

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_DECODE_H_
