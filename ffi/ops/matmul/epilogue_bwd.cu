// The backward pass for a matmul's epilogue: dz = f'(z) dy, and dbias = sum(dz) over rows in a fixed order, in one pass
// over the tensors.
#include <optional>

#include "core/vector_store.cuh"
#include "ops/matmul/epilogue.cuh"
#include "rows/column_sums.cuh"

namespace jaxops {
namespace {

using matmul::Activation;

constexpr const char* kHandler = "epilogue_bwd";

struct EpilogueArguments {
  int64_t rows, columns, chunks;  // per group; chunks: parts of its rows, each summed by separate blocks
  const void *z, *dy;             // z: null if there is no activation
  void* dz;                       // or null
  float* sums;                    // [groups, chunks, columns], or null
  Activation activation;
};

// 8 warps take one row each, 32 packs side by side, and keep kUnrolled rows each in flight. Four blocks fit on a
// multiprocessor; with 4 rows in flight only two did. Measured on an H200, 8192 rows in bf16, us, the sum over rows
// alone: 768 columns 8.4 (11.7), 2304 14.5 (20.6), 3072 17.9 (24.4); with gelu, 3072 columns 42.7 (46.1).
constexpr int kWarps = 8, kThreads = kWarps * 32, kUnrolled = 2, kResidentBlocks = 4;

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    EpilogueBackward(const __grid_constant__ EpilogueArguments a) {
  using P = Pack<T, kPack>;
  constexpr int kWidth = 32 * kPack;  // columns per block
  const int64_t across = (a.columns + kWidth - 1) / kWidth;
  const int64_t tile = blockIdx.x % across, chunk = blockIdx.x / across % a.chunks,
                group = blockIdx.x / across / a.chunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = tile * kWidth + lane * kPack;
  const int64_t first = a.rows * chunk / a.chunks + warp, end = a.rows * (chunk + 1) / a.chunks;
  const int64_t start = group * a.rows * a.columns + column;
  float sums[kPack] = {};
  if (column < a.columns) {
    for (int64_t row = first; row < end; row += kUnrolled * kWarps) {
      P z[kUnrolled], dy[kUnrolled];
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i) {
        const int64_t at = start + min(row + i * kWarps, end - 1) * a.columns;
        if (a.z) z[i] = *reinterpret_cast<const P*>(static_cast<const T*>(a.z) + at);
        dy[i] = *reinterpret_cast<const P*>(static_cast<const T*>(a.dy) + at);
      }
#pragma unroll
      for (int i = 0; i < kUnrolled; ++i) {
        if (row + i * kWarps >= end) break;
        float wide_z[kPack], dz[kPack];
#pragma unroll
        for (int j = 0; j < kPack; ++j) {
          wide_z[j] = a.z ? z[i].template Widen<float>(j) : 0;
          dz[j] = dy[i].template Widen<float>(j);
        }
        matmul::Differentiate<matmul::kAccuracyFor<T>>(a.activation, wide_z, dz);
#pragma unroll
        for (int j = 0; j < kPack; ++j) sums[j] += dz[j];
        if (a.dz) {
          T* const to = static_cast<T*>(a.dz) + start + (row + i * kWarps) * a.columns;
          StoreVector(reinterpret_cast<P*>(to), ToPack<T, kPack>([&](int j) { return dz[j]; }));
        }
      }
    }
  }
  if (!a.sums) return;
  __shared__ float shared[kWarps][kWidth];
#pragma unroll
  for (int j = 0; j < kPack; ++j) shared[warp][lane * kPack + j] = sums[j];
  __syncthreads();
  for (int i = threadIdx.x; i < kWidth; i += kThreads) {
    if (tile * kWidth + i >= a.columns) break;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared[w][i];
    a.sums[(group * a.chunks + chunk) * a.columns + tile * kWidth + i] = total;
  }
}

template <class T>
cudaError_t LaunchEpilogueBackward(Device stream, const EpilogueArguments& a, int64_t groups) {
  const auto blocks = [&](int pack) { return (a.columns + 32 * pack - 1) / (32 * pack) * a.chunks * groups; };
  if (a.columns % kPackOf<T> == 0 && IsAligned(a.z) && IsAligned(a.dy) && IsAligned(a.dz))
    return Launch(stream, EpilogueBackward<T, kPackOf<T>>, {blocks(kPackOf<T>), kThreads}, a);
  return Launch(stream, EpilogueBackward<T, 1>, {blocks(1), kThreads}, a);
}

// [z], dy -> [dz], [chunks' sums, dbias]; tensors are [groups, rows, columns], dbias [groups, columns]. z is there
// unless the activation is kNone.
Error EpilogueBwd(Device stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, int32_t activation,
                  bool has_dz, bool has_dbias) {
  if (activation < 0 || activation >= static_cast<int32_t>(Activation::kCount))
    return Invalid(kHandler, "unknown activation " + std::to_string(activation));
  std::optional<AnyBuffer> z, dy, dz, sums, dbias;
  BufferReader<ffi::RemainingArgs> operands(kHandler, arguments);
  BufferReader<ffi::RemainingRets> reader(kHandler, results);
  if (activation != 0) JAXOPS_RETURN_IF_ERROR(operands.Take(&z));
  JAXOPS_RETURN_IF_ERROR(operands.Take(&dy));
  JAXOPS_RETURN_IF_ERROR(operands.End());
  if (has_dz) JAXOPS_RETURN_IF_ERROR(reader.Take(&dz));
  if (has_dbias) {
    JAXOPS_RETURN_IF_ERROR(reader.Take(&sums));
    JAXOPS_RETURN_IF_ERROR(reader.Take(&dbias));
  }
  JAXOPS_RETURN_IF_ERROR(reader.End());
  const auto shape = dy->dimensions();
  if (shape.size() != 3) return Invalid(kHandler, "dy must be [groups, rows, columns], got " + Describe(shape));
  for (const auto* other : {&z, &dz}) {
    if (!*other) continue;
    const auto dims = (*other)->dimensions();
    if (!std::equal(dims.begin(), dims.end(), shape.begin(), shape.end()) ||
        (*other)->element_type() != dy->element_type()) {
      return Invalid(kHandler, "z, dy and dz must have one shape and dtype");
    }
  }
  EpilogueArguments a = {shape[1],
                         shape[2],
                         1,
                         z ? z->untyped_data() : nullptr,
                         dy->untyped_data(),
                         dz ? dz->untyped_data() : nullptr,
                         nullptr,
                         static_cast<Activation>(activation)};
  RowShape<1> rows;
  SummedResults summed;
  if (has_dbias) {
    rows.groups.Append(shape[0], {shape[2]});
    rows.rows.Append(shape[1], {0});
    rows.columns.Append(shape[2], {1});
    JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "dbias", *dbias, DataType::F32));
    if (static_cast<int64_t>(dbias->element_count()) != shape[0] * shape[2])
      return Invalid(kHandler, "dbias has shape " + Describe(dbias->dimensions()));
    const auto dims = sums->dimensions();
    JAXOPS_RETURN_IF_ERROR(CheckType(kHandler, "the workspace", *sums, DataType::F32));
    if (dims.size() != 3 || dims[0] != shape[0] || dims[1] < 1 || dims[2] != shape[2])
      return Invalid(kHandler, "the workspace has shape " + Describe(dims));
    a.chunks = dims[1];
    a.sums = Data<float>(*sums);
    summed = {1, a.chunks, a.sums, {dbias->untyped_data()}};
  } else {
    a.chunks = std::max<int64_t>(1, std::min<int64_t>(shape[1] / 32, 4096));
  }
  const bool empty = dy->element_count() == 0;
  using Elements = Types<float, __half, __nv_bfloat16>;
  const DataType type = dy->element_type();
  JAXOPS_RETURN_IF_ERROR(First(
      Elements{}, Invalid(kHandler, "no kernel for this element type"), [=]<class T> { return type == kDataType<T>; },
      [&]<class T> {
        return empty ? Error::Success() : FromCuda(kHandler, LaunchEpilogueBackward<T>(stream, a, shape[0]));
      }));
  if (!has_dbias) return Error::Success();
  const rows::SumResults<float> targets(summed, rows, true, false);
  return FromCuda(kHandler, empty ? rows::ClearSums(stream, targets, rows)
                                  : rows::LaunchAddChunks(stream, rows::Layouts<1>(rows, 1, 0), 0, targets));
}

}  // namespace
}  // namespace jaxops

JAXOPS_HANDLER(
    epilogue_bwd, jaxops::EpilogueBwd,
    RemainingArgs().RemainingRets().Attr<int32_t>("activation").Attr<bool>("has_dz").Attr<bool>("has_dbias"));
