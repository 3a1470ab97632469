// ffi/rows/instructions.cuh, emulated.
#ifndef JAXOPS_ROWS_INSTRUCTIONS_CUH_
#define JAXOPS_ROWS_INSTRUCTIONS_CUH_

#include "emulator.h"

namespace jaxops::rows {

inline float Exp2(float x) { return std::exp2(x); }
inline float MaxOrNaN(float a, float b) { return a != a || a > b ? a : b; }
inline void SpreadBooleans(uint32_t four, uint32_t* words) {
  for (int i = 0; i < 4; i += 2)
    words[i / 2] = (four >> 8 * i & 1u) * 0xffffu | (four >> (8 * i + 8) & 1u) * 0xffff0000u;
}
using emulator::ClusterArrive;
using emulator::ClusterRank;
using emulator::ClusterWait;
using emulator::ExpectBytes;
using emulator::InitByteBarrier;
using emulator::WaitForBytes;
template <class V>
void SendToBlock(const V& value, V* target, uint64_t* barrier, uint32_t rank) {
  emulator::SendToBlock(&value, sizeof(V), target, barrier, rank);
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_INSTRUCTIONS_CUH_
