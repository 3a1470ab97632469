// A warpgroup's matrix products (wgmma), with operands in shared memory with the 128-byte swizzle; a TF32 or 16-bit lhs
// may also be in registers. f32 sums.
#ifndef JAXOPS_HOPPER_WGMMA_CUH_
#define JAXOPS_HOPPER_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxops::hopper {

// 8-bit floats: names for the instructions; nothing is computed with them elsewhere.
struct E4M3 {
  uint8_t bits;
};
struct E5M2 {
  uint8_t bits;
};

// How an operand's tile lies: in 128-byte rows, along k (one for each m or n), or along m or n (one for each k, 64
// elements wide; only for 16-bit elements).
enum class Major { kDepth, kSpace };

// 64 rows by 128 bytes, along either.
inline constexpr int kBlockBytes = 8192;

// The descriptor for an operand at `address`: the address, and the distances between 64-wide blocks (kSpace only) and
// between groups of 8 rows, all in units of 16 bytes; swizzle mode 1 (128 bytes). The tile must be aligned to 1024
// bytes.
__device__ inline uint64_t Descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(kBlockBytes >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | uint64_t{1} << 62;
}
// The descriptors for operands that begin at multiples of 16 bytes from `address`, blocks block_bytes apart. They are
// computed from one register at each use: kept in registers from step to step, many would push out sums.
class Descriptors {
 public:
  __device__ Descriptors(uint32_t address, int block_bytes)
      : low_((address & 0x3ffff) >> 4 | static_cast<uint32_t>(block_bytes >> 4) << 16) {
    asm volatile("" : "+r"(low_));
  }
  __device__ uint64_t At(int bytes) const {
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low_ + (bytes >> 4)), "n"(1024 >> 4 | 1 << 30));
    return descriptor;
  }

 private:
  uint32_t low_;
};
// From one instruction's operand to the next one's along k: 32 bytes in each row, or 16 rows.
template <Major kMajor>
inline constexpr int kStepBytes = kMajor == Major::kDepth ? 32 : 16 * 128;
// Instructions along k for a tile with 128-byte rows.
inline constexpr int kSteps = 4;

__device__ inline void FenceRegisters() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Products in flight write their sums, and read operands in registers, behind the compiler's back. After WaitProducts,
// the compiler reads these sums no earlier than here, and the operands have kept their registers until here.
template <class T, int kCount>
__device__ void Settle(T (&registers)[kCount]) {
#pragma unroll
  for (T& value : registers) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(value)::"memory");
    } else {
      asm volatile("" : "+r"(value)::"memory");
    }
  }
}
template <class T, int kRows, int kColumns>
__device__ void Settle(T (&registers)[kRows][kColumns]) {
#pragma unroll
  for (auto& row : registers) Settle(row);
}

// clang-format off
#define JAXOPS_N0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAXOPS_N1 JAXOPS_N0 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAXOPS_N2 JAXOPS_N1 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JAXOPS_N3 JAXOPS_N2 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAXOPS_N4 JAXOPS_N3 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JAXOPS_N5 JAXOPS_N4 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAXOPS_N6 JAXOPS_N5 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define JAXOPS_N7 JAXOPS_N6 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAXOPS_N48 JAXOPS_N0 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define JAXOPS_N80 JAXOPS_N1 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define JAXOPS_N176 JAXOPS_N4 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define JAXOPS_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define JAXOPS_D16(i) JAXOPS_D8(i), JAXOPS_D8(i + 8)
#define JAXOPS_D32(i) JAXOPS_D8(i), JAXOPS_D8(i + 8), JAXOPS_D8(i + 16), JAXOPS_D8(i + 24)
// N, its registers' names, the two descriptors' names, the flag and the two transposition flags.
#define JAXOPS_WGMMA_16BIT(N, type, names, a, b, flag, ta, tb, ...)                                                  \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."  \
               type "." type " {" names "}, " a ", " b ", add, 1, 1, " ta ", " tb ";\n}"                             \
               : __VA_ARGS__ : "l"(lhs), "l"(rhs), "r"(accumulate), "n"(kLhs == Major::kSpace), "n"(kRhs == Major::kSpace))
#define JAXOPS_WGMMA_OTHER(N, types, names, a, b, flag, ta, tb, ...)                                                 \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N types       \
               " {" names "}, " a ", " b ", add, 1, 1;\n}"                                                           \
               : __VA_ARGS__ : "l"(lhs), "l"(rhs), "r"(accumulate))
// lhs from registers: its four registers' names, the name of rhs's descriptor, the flag.
#define JAXOPS_WGMMA_FROM_REGISTERS(N, names, a0, a1, a2, a3, b, flag, ...)                                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32" \
               " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", add, 1, 1;\n}"                               \
               : __VA_ARGS__ : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs), "r"(accumulate))
// As above, for 16-bit operands, with rhs's transposition flag.
#define JAXOPS_WGMMA_16BIT_FROM_REGISTERS(N, type, names, a0, a1, a2, a3, b, flag, tb, ...)                          \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."  \
               type "." type " {" names "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", add, 1, 1, " tb ";\n}"          \
               : __VA_ARGS__ : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs), "r"(accumulate), "n"(kRhs == Major::kSpace))
#define JAXOPS_WGMMA_REGISTER_WIDTHS(type)                                                                           \
  if constexpr (kN == 64) JAXOPS_WGMMA_16BIT_FROM_REGISTERS(64, type, JAXOPS_N1, "%32", "%33", "%34", "%35", "%36", "%37", "%38", JAXOPS_D32(0)); \
  if constexpr (kN == 128) JAXOPS_WGMMA_16BIT_FROM_REGISTERS(128, type, JAXOPS_N3, "%64", "%65", "%66", "%67", "%68", "%69", "%70", JAXOPS_D32(0), JAXOPS_D32(32)); \
  if constexpr (kN == 192) JAXOPS_WGMMA_16BIT_FROM_REGISTERS(192, type, JAXOPS_N5, "%96", "%97", "%98", "%99", "%100", "%101", "%102", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64)); \
  if constexpr (kN == 256) JAXOPS_WGMMA_16BIT_FROM_REGISTERS(256, type, JAXOPS_N7, "%128", "%129", "%130", "%131", "%132", "%133", "%134", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64), JAXOPS_D32(96))
// Widths for 16-bit products only.
#define JAXOPS_WGMMA_16BIT_WIDTHS(type)                                                                              \
  if constexpr (kN == 32) JAXOPS_WGMMA_16BIT(32, type, JAXOPS_N0, "%16", "%17", "%18", "%19", "%20", JAXOPS_D16(0)); \
  if constexpr (kN == 48) JAXOPS_WGMMA_16BIT(48, type, JAXOPS_N48, "%24", "%25", "%26", "%27", "%28", JAXOPS_D16(0), JAXOPS_D8(16)); \
  if constexpr (kN == 80) JAXOPS_WGMMA_16BIT(80, type, JAXOPS_N80, "%40", "%41", "%42", "%43", "%44", JAXOPS_D32(0), JAXOPS_D8(32)); \
  if constexpr (kN == 96) JAXOPS_WGMMA_16BIT(96, type, JAXOPS_N2, "%48", "%49", "%50", "%51", "%52", JAXOPS_D32(0), JAXOPS_D16(32)); \
  if constexpr (kN == 176) JAXOPS_WGMMA_16BIT(176, type, JAXOPS_N176, "%88", "%89", "%90", "%91", "%92", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D16(64), JAXOPS_D8(80))
#define JAXOPS_WGMMA_WIDTHS(form, type)                                                                              \
  if constexpr (kN == 64) form(64, type, JAXOPS_N1, "%32", "%33", "%34", "%35", "%36", JAXOPS_D32(0));               \
  if constexpr (kN == 128) form(128, type, JAXOPS_N3, "%64", "%65", "%66", "%67", "%68", JAXOPS_D32(0), JAXOPS_D32(32)); \
  if constexpr (kN == 192) form(192, type, JAXOPS_N5, "%96", "%97", "%98", "%99", "%100", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64)); \
  if constexpr (kN == 256) form(256, type, JAXOPS_N7, "%128", "%129", "%130", "%131", "%132", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64), JAXOPS_D32(96))
// clang-format on

// d = lhs rhs, or d += lhs rhs if `accumulate`, for 64 x kN sums: thread t's element 4 i + 2 h + j belongs to row t /
// 32 * 16 + h * 8 + t % 32 / 4 and column 8 i + t % 4 * 2 + j. float stands for TF32: the low 13 bits are ignored.
template <class A, class B, int kN, Major kLhs, Major kRhs>
__device__ void MultiplyAdd(float (&d)[kN / 2], uint64_t lhs, uint64_t rhs, int accumulate) {
  constexpr bool kTwoBytes = sizeof(A) == 2;
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256 ||
                (kTwoBytes && (kN == 32 || kN == 48 || kN == 80 || kN == 96 || kN == 176)));
  if constexpr (std::is_same_v<A, __nv_bfloat16> && std::is_same_v<B, A>) {
    JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_16BIT, "bf16");
    JAXOPS_WGMMA_16BIT_WIDTHS("bf16");
  } else if constexpr (std::is_same_v<A, __half> && std::is_same_v<B, A>) {
    JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_16BIT, "f16");
    JAXOPS_WGMMA_16BIT_WIDTHS("f16");
  } else {
    static_assert(kLhs == Major::kDepth && kRhs == Major::kDepth, "only 16-bit operands may lie along m or n");
    if constexpr (std::is_same_v<A, float> && std::is_same_v<B, A>) {
      JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_OTHER, "k8.f32.tf32.tf32");
    } else if constexpr (std::is_same_v<A, E4M3> && std::is_same_v<B, E4M3>) {
      JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_OTHER, "k32.f32.e4m3.e4m3");
    } else if constexpr (std::is_same_v<A, E4M3>) {
      JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_OTHER, "k32.f32.e4m3.e5m2");
    } else if constexpr (std::is_same_v<B, E4M3>) {
      JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_OTHER, "k32.f32.e5m2.e4m3");
    } else {
      JAXOPS_WGMMA_WIDTHS(JAXOPS_WGMMA_OTHER, "k32.f32.e5m2.e5m2");
    }
  }
}

// As above, for TF32 with lhs from registers: thread t's element 2 q + h belongs to row t / 32 * 16 + h * 8 + t % 32 /
// 4 and k = 4 q + t % 4.
template <int kN>
__device__ void MultiplyAddFromRegisters(float (&d)[kN / 2], const uint32_t (&lhs)[4], uint64_t rhs, int accumulate) {
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  // clang-format off
  if constexpr (kN == 64) JAXOPS_WGMMA_FROM_REGISTERS(64, JAXOPS_N1, "%32", "%33", "%34", "%35", "%36", "%37", JAXOPS_D32(0));
  if constexpr (kN == 128) JAXOPS_WGMMA_FROM_REGISTERS(128, JAXOPS_N3, "%64", "%65", "%66", "%67", "%68", "%69", JAXOPS_D32(0), JAXOPS_D32(32));
  if constexpr (kN == 192) JAXOPS_WGMMA_FROM_REGISTERS(192, JAXOPS_N5, "%96", "%97", "%98", "%99", "%100", "%101", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64));
  if constexpr (kN == 256) JAXOPS_WGMMA_FROM_REGISTERS(256, JAXOPS_N7, "%128", "%129", "%130", "%131", "%132", "%133", JAXOPS_D32(0), JAXOPS_D32(32), JAXOPS_D32(64), JAXOPS_D32(96));
  // clang-format on
}

// As above, for 16-bit operands with lhs from registers: a register has two elements from a row, k and k + 1, the lower
// one in its low half. Thread t's register 2 q + h belongs to row t / 32 * 16 + h * 8 + t % 32 / 4 and k = 8 q + 2 (t %
// 4).
// A product's sums, rounded in pairs, are in their places.
template <class T, int kN, Major kRhs>
__device__ void MultiplyAddFromRegisters(float (&d)[kN / 2], const uint32_t* lhs, uint64_t rhs, int accumulate) {
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    JAXOPS_WGMMA_REGISTER_WIDTHS("bf16");
  } else {
    JAXOPS_WGMMA_REGISTER_WIDTHS("f16");
  }
}
#undef JAXOPS_N0
#undef JAXOPS_N1
#undef JAXOPS_N2
#undef JAXOPS_N3
#undef JAXOPS_N4
#undef JAXOPS_N5
#undef JAXOPS_N6
#undef JAXOPS_N7
#undef JAXOPS_N48
#undef JAXOPS_N80
#undef JAXOPS_N176
#undef JAXOPS_D8
#undef JAXOPS_D16
#undef JAXOPS_D32
#undef JAXOPS_WGMMA_16BIT
#undef JAXOPS_WGMMA_OTHER
#undef JAXOPS_WGMMA_FROM_REGISTERS
#undef JAXOPS_WGMMA_16BIT_FROM_REGISTERS
#undef JAXOPS_WGMMA_REGISTER_WIDTHS
#undef JAXOPS_WGMMA_16BIT_WIDTHS
#undef JAXOPS_WGMMA_WIDTHS

}  // namespace jaxops::hopper

#endif  // JAXOPS_HOPPER_WGMMA_CUH_
