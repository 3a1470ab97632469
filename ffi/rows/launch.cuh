// The placement tables, and the launch of a row kernel.
#ifndef JAXOPS_ROWS_LAUNCH_CUH_
#define JAXOPS_ROWS_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/launch.cuh"
#include "rows/row.cuh"

namespace jaxops::rows {

template <int kLanes, int kCluster = 1>
using StreamedAlong = Along<kLanes, 0, 1, kCluster>;
template <int kWidth, int kLanes, int kCluster = 1, int kBlocks = 1>
using StreamedAcross = Across<kWidth, kLanes, 0, kCluster, kBlocks>;

// The tables. Of each the first placement that holds the row is taken. A pack is 16 bytes of the widest dtype involved,
// of rows across at most four elements; a comment gives the columns of 16-bit elements that fit. TUNING.md has the
// measurements.
// Before all of these: the shortest rows, which more lanes would be idle for.
using Shortest = Types<Along<1, 1, 2>,  //      8
                       Along<2, 1, 2>,  //     16
                       Along<2, 2>>;    //     32, and where rows differ in what is broadcast to them

using ShortestAcross = Types<Across<128, 1, 4>,  //  4 columns
                             Across<32, 4, 4>>;  // 16

// Few rows, behind the shortest ones.
struct FewRows {
  using Packs = Types<FewAlong<32>,          //  256
                      FewAlong<128>,         // 1024
                      FewAlong<256>,         // 2048
                      FewAlong<512>,         // 4096
                      FewAlong<1024>>;       // 8192
  using Halves = Types<FewAlong<32, 4>,      //  512
                       FewAlong<64, 4>,      // 1024
                       FewAlong<128, 4>,     // 2048
                       FewAlong<256, 4>>;    // 4096
  using Singles = Types<FewAlong<32, 4>,     //  128
                        FewAlong<128, 4>,    //  512
                        FewAlong<512, 4>,    // 2048
                        FewAlong<1024, 4>>;  // 4096
};
struct FewRowsWithOptions {
  using Packs = Types<FewAlong<32>, FewAlong<128>, FewAlong<256>, FewAlong<512>>;
  using Halves = Types<>;
  using Singles = Types<>;
};
struct NoFewRows {
  using Packs = Types<>;
  using Halves = Types<>;
  using Singles = Types<>;
};

struct OneInput {
  using Plain = Types<Along<4, 2, 1, 1, 10>,  //     64
                      Along<8, 2, 1, 1, 16>,  //    128
                      Along<8, 4>,            //    256
                      Along<16, 4, 1, 1, 9>,  //    512
                      Along<32, 4>,           //   1024
                      Along<64, 4>,           //   2048
                      Along<64, 8>,           //   4096
                      Along<128, 6>,          //   6144
                      Along<128, 8>,          //   8192
                      Along<256, 8>,          //  16384
                      Along<512, 8>,          //  32768
                      Along<512, 8, 1, 2>,    //  65536
                      Along<256, 8, 1, 8>,    // 131072
                      Along<256, 8, 1, 16>,   // 262144
                      Along<512, 8, 1, 16>,   // 524288
                      StreamedAlong<512, 16>, StreamedAlong<512>>;
  using PlainAcross = Types<Across<8, 16, 4>,         //    64 columns, of f32
                            Across<8, 16, 8>,         //   128
                            Across<8, 32, 8>,         //   256
                            Across<8, 32, 16, 1, 2>,  //   512
                            Across<8, 32, 16, 2, 2>,  //  1024
                            Across<8, 32, 16, 4, 2>,  //  2048
                            Across<8, 32, 16, 8, 2>,  //  4096
                            Across<8, 64, 8, 16, 2>,  //  8192
                            StreamedAcross<8, 128, 16>, StreamedAcross<8, 64>>;
  using PlainAcross16 = Types<Across<8, 16, 4>,          //    64 columns
                              Across<8, 16, 8>,          //   128
                              Across<8, 32, 8>,          //   256
                              Across<8, 32, 16, 1, 4>,   //   512
                              Across<8, 64, 16, 1, 2>,   //  1024
                              Across<8, 32, 16, 4, 4>,   //  2048
                              Across<8, 32, 16, 8, 4>,   //  4096
                              Across<8, 32, 16, 16, 4>,  //  8192
                              Across<8, 64, 16, 16, 2>,  // 16384
                              StreamedAcross<8, 128, 16>, StreamedAcross<8, 64>>;
  using Shifted = Types<Along<8, 3>,           //    185
                        Along<8, 5>,           //    313
                        Along<16, 4>,          //    505
                        Along<16, 5>,          //    633
                        Along<32, 4>,          //   1017
                        Along<32, 6>,          //   1529
                        Along<64, 5>,          //   2553
                        Along<128, 4>,         //   4089
                        Along<128, 5>,         //   5113
                        Along<256, 5>,         //  10233
                        Along<512, 5>,         //  20473
                        Along<256, 8, 1, 2>,   //  32761
                        Along<1024, 7>,        //  57337
                        Along<256, 8, 1, 8>,   // 131065
                        Along<256, 8, 1, 16>,  // 262137
                        Along<512, 8, 1, 16>,  // 524281
                        StreamedAlong<512>>;
  using General = Types<Along<64, 4>,   //  2048
                        Along<256, 8>,  // 16384
                        StreamedAlong<512>>;
  using GeneralAcross = Types<Across<8, 32, 8>, StreamedAcross<8, 64>>;
};
// Results of 16 bits that take an exponential each.
struct OneInputOfExponentials16 : OneInput {
  using Plain = Joined<Types<Along<8, 1, 2, 1, 16>>, OneInput::Plain>;  // 64
};
// One tensor and parameters, which compete for the caches and the registers.
using LongWithParameters = Types<Along<512, 8, 1, 1, 2>,  //  32768
                                 Along<1024, 8>,          //  65536
                                 Along<512, 8, 1, 4>,     // 131072
                                 Along<512, 8, 1, 16>,    // 524288
                                 StreamedAlong<512, 16>, StreamedAlong<512>>;
struct OneInputWithParameter : OneInput {
  using Plain = Joined<Types<Along<4, 2>,              //     64
                             Along<8, 2, 1, 1, 10>,    //    128
                             Along<16, 2, 2>,          //    256
                             Along<16, 4, 1, 1, 9>,    //    512
                             Along<32, 3>,             //    768
                             Along<32, 4>,             //   1024
                             Along<64, 4>,             //   2048
                             Along<128, 3>,            //   3072
                             Along<128, 4>,            //   4096
                             Along<128, 5>,            //   5120
                             Along<256, 3, 1, 1, 5>,   //   6144
                             Along<256, 4, 1, 1, 4>,   //   8192
                             Along<256, 6, 1, 1, 3>,   //  12288
                             Along<256, 8, 1, 1, 2>>,  //  16384
                       LongWithParameters>;
  // Fewer: with many rows and parameters they are staged (rows/row_loop.cuh).
  using Shifted = Types<Along<8, 3>,           //    185
                        Along<32, 5>,          //   1273
                        Along<128, 5>,         //   5113
                        Along<256, 5>,         //  10233
                        Along<512, 5>,         //  20473
                        Along<512, 8, 1, 16>,  // 524281
                        StreamedAlong<512>>;
};
struct OneInputWithTwoParameters : OneInputWithParameter {
  using Plain = Joined<Types<Along<4, 2>,              //     64
                             Along<4, 4, 1, 1, 8>,     //    128
                             Along<8, 4, 1, 1, 9>,     //    256
                             Along<16, 4, 1, 1, 9>,    //    512
                             Along<32, 3>,             //    768
                             Along<32, 4>,             //   1024
                             Along<64, 4, 1, 1, 9>,    //   2048
                             Along<64, 6, 1, 1, 8>,    //   3072
                             Along<128, 4, 1, 1, 9>,   //   4096
                             Along<128, 5, 1, 1, 9>,   //   5120
                             Along<128, 6, 1, 1, 8>,   //   6144
                             Along<128, 8, 1, 1, 6>,   //   8192
                             Along<256, 6, 1, 1, 4>,   //  12288
                             Along<256, 8, 1, 1, 3>>,  //  16384
                       LongWithParameters>;
};
struct TwoInputs : OneInput {
  using Plain = Types<Along<8, 1, 4>,        //     64
                      Along<16, 1, 4>,       //    128
                      Along<16, 2, 2>,       //    256
                      Along<32, 2, 2>,       //    512
                      Along<32, 4>,          //   1024
                      Along<64, 4>,          //   2048
                      Along<128, 4>,         //   4096
                      Along<128, 5>,         //   5120
                      Along<256, 3>,         //   6144
                      Along<256, 4>,         //   8192
                      Along<256, 5>,         //  10240
                      Along<256, 4, 1, 2>,   //  16384
                      Along<256, 4, 1, 4>,   //  32768
                      Along<512, 4, 1, 4>,   //  65536
                      Along<512, 4, 1, 8>,   // 131072
                      Along<512, 4, 1, 16>,  // 262144
                      StreamedAlong<512, 16>, StreamedAlong<512>>;
  using PlainAcross = Types<Across<8, 16, 8>,         //  128 columns, of f32
                            Across<8, 32, 8, 1, 2>,   //  256
                            Across<8, 64, 8>,         //  512
                            Across<8, 32, 4, 8, 4>,   // 1024
                            Across<8, 32, 4, 16, 4>,  // 2048
                            Across<8, 64, 4, 16, 2>,  // 4096
                            StreamedAcross<8, 64, 16, 2>, StreamedAcross<8, 64>>;
  using PlainAcross16 = Types<Across<16, 16, 8>,        //  128
                              Across<8, 32, 8, 1, 3>,   //  256
                              Across<8, 32, 8, 2, 4>,   //  512
                              Across<8, 32, 8, 4, 4>,   // 1024
                              Across<8, 32, 8, 8, 4>,   // 2048
                              Across<8, 32, 8, 16, 4>,  // 4096
                              StreamedAcross<32, 16, 16, 2>, StreamedAcross<8, 64>>;
  using Shifted = Types<Along<8, 3>,           //    185
                        Along<8, 5>,           //    313
                        Along<16, 4>,          //    505
                        Along<16, 5>,          //    633
                        Along<32, 4>,          //   1017
                        Along<32, 6>,          //   1529
                        Along<64, 5>,          //   2553
                        Along<128, 4>,         //   4089
                        Along<128, 5>,         //   5113
                        Along<256, 5>,         //  10233
                        Along<256, 5, 1, 2>,   //  20473
                        Along<256, 4, 1, 4>,   //  32761
                        Along<256, 4, 1, 8>,   //  65529
                        Along<512, 4, 1, 8>,   // 131065
                        Along<512, 4, 1, 16>,  // 262137
                        StreamedAlong<512>>;
};
struct TwoInputsWithParameters : TwoInputs {
  using Shifted = OneInputWithParameter::Shifted;
};
// Each placement costs build time and size: fewer for bodies that hold more than packs, and for f16. What is too long
// for them is taken as if it were unaligned.
struct Short : OneInput {
  using Plain = Types<Along<8, 1>,             //     64
                      Along<8, 4, 1, 1, 4>,    //    256
                      Along<16, 4>,            //    512
                      Along<32, 4>,            //   1024
                      Along<64, 4>,            //   2048
                      Along<128, 4>,           //   4096
                      Along<256, 4, 1, 1, 2>,  //   8192
                      Along<512, 4>,           //  16384
                      Along<512, 4, 1, 8>>;    // 131072
  using PlainAcross = Types<Across<8, 32, 8>, StreamedAcross<8, 64, 16>, StreamedAcross<8, 64>>;
  using PlainAcross16 = PlainAcross;
  using Shifted = Types<Along<32, 2>, Along<128, 5>, Along<512, 5>, Along<512, 4, 1, 8>, StreamedAlong<512>>;
  using General = Types<Along<64, 4>, StreamedAlong<512>>;
  using GeneralAcross = Types<StreamedAcross<8, 64>>;
};
// Of unaligned rows, those that single elements leave.
struct ShortWithOptions : Short {
  using Shifted = Types<Along<128, 5>, Along<512, 5>, Along<512, 4, 1, 8>, StreamedAlong<512>>;
};
// Biased logits, and masked ones of f32, are held in f32: without a limit on registers too few blocks are resident.
struct Options : ShortWithOptions {
  using Plain = Types<Along<8, 1>,             //     64
                      Along<8, 4, 1, 1, 7>,    //    256
                      Along<16, 4, 1, 1, 7>,   //    512
                      Along<32, 4, 1, 1, 7>,   //   1024
                      Along<64, 4, 1, 1, 7>,   //   2048
                      Along<128, 4, 1, 1, 7>,  //   4096
                      Along<256, 4, 1, 1, 3>,  //   8192
                      Along<512, 4>,           //  16384
                      Along<512, 4, 1, 8>>;    // 131072
};
// Masked logits of 16 bits are held as they are. What a thread does for a row, however many packs it has of it, is a
// third of the work.
struct Masks16 : Short {
  using Plain = Types<Along<8, 1>,             //     64
                      Along<4, 8, 1, 1, 6>,    //    256
                      Along<8, 8, 1, 1, 6>,    //    512
                      Along<16, 8, 1, 1, 6>,   //   1024
                      Along<32, 8, 1, 1, 6>,   //   2048
                      Along<64, 8, 1, 1, 6>,   //   4096
                      Along<128, 8, 1, 1, 6>,  //   8192
                      Along<256, 8, 1, 1, 3>,  //  16384
                      Along<512, 4, 1, 8>>;    // 131072
};
// Results of another dtype than the input's. A pack has four elements.
struct Mixed {
  using Plain =
      Types<Along<4, 2>, Along<8, 4>, Along<32, 4>, Along<128, 4>, Along<256, 4>, Along<512, 4>, Along<512, 4, 1, 8>>;
  using PlainAcross = Types<>;
  using PlainAcross16 = Types<>;
  using Shifted = Types<Along<32, 5>, Along<256, 5>, StreamedAlong<512>>;
  using General = Types<>;
  using GeneralAcross = Types<>;
};
// f64 has single elements alone.
struct NoPacks {
  using Plain = Types<>;
  using PlainAcross = Types<>;
  using PlainAcross16 = Types<>;
  using Shifted = Types<>;
  using General = Types<>;
  using GeneralAcross = Types<>;
};
// Short rows that are no whole packs of 16 bits: of packs of half as many elements, and of single elements.
using ShortHalves = Types<Along<2, 2>,   // 16
                          Along<4, 2>,   // 32
                          Along<8, 2>>;  // 64

using ShortSingles = Types<Along<1, 4, 2>,    //  4
                           Along<1, 8>,       //  8
                           Along<2, 8>,       // 16
                           Along<4, 8>>;      // 32
inline constexpr int64_t kShortColumns = 32;  // that those hold

// Longer ones are shifted unless they are few, but not those with masks and biases, which lie otherwise: shifted, those
// took two to three times the time of single elements. A thread has many of a row, as what it does for the row itself
// costs as much where it has few.
using SinglesOfShort = Types<Along<8, 8>>;  // 64, of ops that are Op::kShort
template <int kInputs>
using SinglesWithOptions = Joined<SinglesOfShort,
                                  Types<Along<16, 8>,   //  128
                                        Along<32, 8>>,  //  256
                                  std::conditional_t<kInputs == 1,
                                                     Types<Along<32, 16, 1, 1, 8>,    //  512
                                                           Along<64, 16, 1, 1, 8>,    // 1024
                                                           Along<128, 16, 1, 1, 8>,   // 2048
                                                           Along<256, 16, 1, 1, 4>,   // 4096
                                                           Along<512, 16, 1, 1, 2>>,  // 8192
                                                     Types<Along<32, 16>,             //  512
                                                           Along<64, 16>,             // 1024
                                                           Along<128, 16>>>>;         // 2048
// Single elements of any rows: what no table takes.
struct SingleElements {
  using Plain = Types<>;
  using General = Types<Along<32, 4>, Along<256, 8>, StreamedAlong<512>>;
  // Of many rows a cluster's threads would have few elements each.
  using LongAcross = Types<FewAcross<32, 16, 0, 16>, StreamedAcross<32, 16>>;
  using GeneralAcross = Joined<Types<Across<8, 32, 8>>, LongAcross>;  //  256
  using PlainAcross = Joined<Types<Across<128, 1, 8>,                 //    8
                                   FewAcross<8, 32, 8>,               //  256
                                   Across<32, 16, 16>,                //  256
                                   FewAcross<8, 32, 8, 8>>,           // 2048
                             LongAcross>;
};
// Fewer: each costs a tenth of a megabyte of a release.
struct SingleDoubles {
  using Plain = Types<Along<4, 8>, Along<32, 4>, Along<256, 8>, StreamedAlong<512>>;
  using General = Types<StreamedAlong<512>>;
  using PlainAcross = Types<>;
  using GeneralAcross = SingleElements::LongAcross;
};

// Ops on logits with options, forward or backward; not norms with masks.
template <class Op>
inline constexpr bool kOptions = Op::kShort && Op::kParameters == 0;
template <class T, class Op>
using TablesOfOneInput = std::conditional_t<
    Op::kBroadcasts == 0,
    std::conditional_t<sizeof(T) == 2 && requires { requires Op::kExponentials; }, OneInputOfExponentials16, OneInput>,
    std::conditional_t<Op::kParameters == 2, OneInputWithTwoParameters, OneInputWithParameter>>;
template <class T, class Op>
using TablesOfOptions = std::conditional_t<sizeof(T) == 2 && requires { requires Op::kMasksAlone; }, Masks16, Options>;
template <class T, class U, class Op>
using Tables = std::conditional_t<
    std::is_same_v<T, double>, NoPacks,
    std::conditional_t<
        !std::is_same_v<T, U> || std::is_same_v<T, AnyFloat>, Mixed,
        std::conditional_t<kOptions<Op>, std::conditional_t<Op::kInputs == 1, TablesOfOptions<T, Op>, ShortWithOptions>,
                           std::conditional_t<Op::kShort || std::is_same_v<T, __half>, Short,
                                              std::conditional_t<Op::kInputs == 2,
                                                                 std::conditional_t<Op::kBroadcasts != 0,
                                                                                    TwoInputsWithParameters, TwoInputs>,
                                                                 TablesOfOneInput<T, Op>>>>>>;

// The tables were measured on Hopper. Other GPUs get these placements of them: some of each table, among them those of
// any length. Each costs build time and size for every architecture.
template <class P>
inline constexpr bool kPortable =
    kIsOneOf<P, Along<8, 4>, Along<32, 4>, Along<32, 8>, Along<128, 4>, Along<128, 4, 1, 1, 9>, Along<256, 4>,
             Along<256, 8>, Along<256, 8, 1, 1, 2>, Along<256, 8, 1, 1, 3>, Along<512, 4>, Along<512, 8, 1, 16>,
             Along<32, 5>, Along<128, 5>, Along<128, 16>, Along<128, 16, 1, 1, 8>, Along<32, 4, 1, 1, 7>,
             Along<128, 4, 1, 1, 7>, Along<16, 8, 1, 1, 6>, Along<128, 8, 1, 1, 6>, StreamedAlong<512>,
             Across<8, 32, 8>, Across<8, 32, 8, 1, 3>, Across<8, 64, 8>, StreamedAcross<8, 64>, StreamedAcross<32, 16>>;

// Whether code for a compute capability has kernels of a placement. Clusters of more than 8 blocks are Hopper's and
// those of the data centres' GPUs that followed it.
template <class P>
__host__ __device__ constexpr bool RunsOn(int capability) {
  const int cluster = capability < kHopper ? 1 : capability / 10 <= 10 ? 16 : 8;
  return P::kCluster <= cluster && (kPortable<P> || capability == kHopper);
}
// Kernels are empty where they do not run.
#ifdef __CUDA_ARCH__
template <class P>
inline constexpr bool kRunsHere = RunsOn<P>(__CUDA_ARCH__ / 10);
#else
template <class P>
inline constexpr bool kRunsHere = true;
#endif
// Resident blocks that registers must allow. An empty kernel needs none, and its placement may name more than the
// multiprocessors of a GPU that it does not run on can hold (1536 threads instead of 2048).
template <class P>
inline constexpr int kMinBlocksHere = kRunsHere<P> ? P::kMinBlocks : 1;

// Single elements of a forward pass that masks: those beyond a row's end are masked too, so that nothing between
// reading and storing asks where a row ends.
template <class P>
inline constexpr bool kHoldsOneRow = !P::kAcross && P::kPacks > 0 && P::kRows == 1 && P::kCluster == 1;
template <class P, int kV, Lay kLay, class Op>
inline constexpr bool kPaddedSingles =
    kV == 1 && kLay == Lay::kPlain && kHoldsOneRow<P> && Op::kInputs == 1 && kOptions<Op>;

// Few rows wait for what a kernel knows of them to be fetched, too.
template <class P, Lay kLay, class Op>
using RowGeometry = std::conditional_t<kForFewRows<P> && !P::kAcross && !Op::kShort, Geometry<Op::kSlots, 1, 1>,
                                       GeometryOf<Op::kSlots, kLay>>;

template <class P, int kV, Lay kLay, class A, class Op>
__global__ void __launch_bounds__(P::kThreads, kMinBlocksHere<P>)
    RowKernel(const __grid_constant__ Op op, const __grid_constant__ RowGeometry<P, kLay, Op> geometry) {
  if constexpr (kRunsHere<P>) {
    using RowType = Row<P, kV, kLay, A, RowGeometry<P, kLay, Op>, kPaddedSingles<P, kV, kLay, Op>>;
    RowType row(geometry);
    // Where a block has one row there is none beyond the last.
    const int64_t end = RowType::kBlockRows == 1 ? std::numeric_limits<int64_t>::max() : geometry.rows.total;
    row.MoveToTeam(int64_t{blockIdx.x / P::kCluster} * RowType::kBlockRows, end, {});
    op(row);
  }
}

// kManyBlocks: how many blocks of rows there must be where each thread works on several rows, as else most
// multiprocessors would be idle. kFewThreads: "few rows" take at most so many threads, half of what an H200 runs at
// once, or in clusters, whose threads have little to do each, eight times as many. Smaller when emulated, for tests to
// reach every placement.
#ifdef JAXOPS_EMULATED
inline constexpr int64_t kManyBlocks = 1, kFewThreads = 3 * 1024;
#else
inline constexpr int64_t kManyBlocks = 132, kFewThreads = 132 * 1024;
#endif

// Whether the rows are enough, and alike, where a thread takes several, or few enough for their placements.
template <class P>
bool SuitsRows(int64_t rows, bool rows_alike) {
  if (kForFewRows<P>) return rows * P::kLanes * P::kCluster <= (P::kCluster > 1 ? 8 : 1) * kFewThreads;
  return P::kRows == 1 || (rows_alike && rows >= kManyBlocks * P::kTeams * P::kRows);
}

template <class P, int kV, Lay kLay>
bool Fits(int64_t columns, int capability) {
  if (!RunsOn<P>(capability)) return false;
  const int64_t packs = P::kAcross ? columns : (columns + (kLay == Lay::kShifted ? kV - 1 : 0) + kV - 1) / kV;
  const int64_t threads = int64_t{P::kLanes} * P::kCluster;             // of a row
  if (P::kPacks == 0) return P::kCluster == 1 || packs >= 4 * threads;  // fewer are not worth a cluster's exchange
  if (P::kStaged) return StagedFits<P>(columns);
  return packs <= threads * P::kPacks;
}

// False if no placement of the table holds the rows.
template <class Placements, int kV, Lay kLay, class A, class Op>
bool LaunchPlacement(cudaStream_t stream, const Op& op, const Layouts<Op::kSlots>& layouts, cudaError_t* status) {
  const int64_t rows = layouts.rows.total, columns = layouts.columns.total;
  const int capability = CompiledCapability();
  return First(
      Placements{}, false,
      [&]<class P> {
        return layouts.template Fit<RowGeometry<P, kLay, Op>>() && SuitsRows<P>(rows, layouts.rows_alike) &&
               Fits<P, kV, kLay>(columns, capability);
      },
      [&]<class P> {
        using G = RowGeometry<P, kLay, Op>;
        constexpr int kBlockRows = Row<P, kV, kLay, A, G>::kBlockRows;
        const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows * P::kCluster;
        const Grid grid = {blocks, P::kThreads, P::kCluster};
        *status = Launch(stream, RowKernel<P, kV, kLay, A, Op>, grid, op, layouts.template To<G>());
        return true;
      });
}

// The dtypes for which there are packs across, and of those the ones for which there are placements of all kinds.
template <class T, class U>
inline constexpr bool kPacksAcross = std::is_same_v<T, U> && kIsOneOf<T, float, __nv_bfloat16, __half>;
template <class T, class U = T>
inline constexpr bool kTuned = std::is_same_v<T, U> && kIsOneOf<T, float, __nv_bfloat16>;

// The placements for few rows. The backward passes of the softmaxes have less to gain.
template <class T, class U, class Op>
using FewRowsOf = std::conditional_t<!kTuned<T, U> || (Op::kInputs == 2 && (Op::kShort || Op::kParameters == 0)),
                                     NoFewRows, std::conditional_t<Op::kShort, FewRowsWithOptions, FewRows>>;

// The rows of packs that are plain, the shortest first. Doubles have no packs.
template <class T, class Table, class FewPacks = Types<>>
using PlainOf =
    Joined<std::conditional_t<std::is_same_v<T, double>, Types<>, Shortest>, FewPacks, typename Table::Plain>;

// The dtype of the kernels of single elements for tensors of T: they have nothing to gain from knowing it.
template <class T>
using Single = std::conditional_t<std::is_same_v<T, double>, double, AnyFloat>;

// Runs op(row) for every row of tensors of the dtypes T and U, or single(row), the same for tensors of Single<T>.
// Op::kInputs tensors are held at once; Op::kShort if the body holds more than their packs. Op::kBroadcasts: the slots
// of operands that are read in packs, as bits.
template <class T, class U, class Op, class SingleOp, int kMore>
cudaError_t LaunchRows(cudaStream_t stream, const Op& op, const SingleOp& single, const RowShape<kMore>& shape) {
  using A = Accumulator<T>;
  using Table = Tables<T, U, Op>;
  using SingleTable = std::conditional_t<std::is_same_v<T, double>, SingleDoubles, SingleElements>;
  if (shape.size() == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  const Layouts<SingleOp::kSlots> elements(shape, 1, SingleOp::kBroadcasts);
  bool done = false;
  if (shape.across) {
    constexpr int kV = kPackAcross<T, U>;
    using Plain = Joined<
        std::conditional_t<kPacksAcross<T, U>, ShortestAcross, Types<>>,
        std::conditional_t<sizeof(T) + sizeof(U) == 4, typename Table::PlainAcross16, typename Table::PlainAcross>>;
    const Layouts<Op::kSlots> packs(shape, kV, Op::kBroadcasts);
    if (packs.plain) {
      done = LaunchPlacement<Plain, kV, Lay::kPlain, A>(stream, op, packs, &status);
    } else if (packs.aligned) {
      done = LaunchPlacement<typename Table::GeneralAcross, kV, Lay::kGeneral, A>(stream, op, packs, &status);
    }
    if (!done && elements.plain) {
      done = LaunchPlacement<typename SingleTable::PlainAcross, 1, Lay::kPlain, A>(stream, single, elements, &status);
    }
    if (!done) {
      LaunchPlacement<typename SingleTable::GeneralAcross, 1, Lay::kGeneral, A>(stream, single, elements, &status);
    }
    return status;
  }
  constexpr int kV = kPackOf<T, U>;
  const Layouts<Op::kSlots> packs(shape, kV, Op::kBroadcasts);
  if (packs.plain) {
    using Plain = PlainOf<T, Table, typename FewRowsOf<T, U, Op>::Packs>;
    done = LaunchPlacement<Plain, kV, Lay::kPlain, A>(stream, op, packs, &status);
  }
  const Layouts<Op::kSlots> halves(shape, std::max(kV / 2, 1), Op::kBroadcasts);
  if constexpr (kV == 8 && kTuned<T>) {
    if (!done && halves.plain) {
      using Halves = Joined<ShortHalves, typename FewRowsOf<T, U, Op>::Halves>;
      done = LaunchPlacement<Halves, kV / 2, Lay::kPlain, A>(stream, op, halves, &status);
    }
  }
  // The kernels for results of another dtype.
  const auto launch_halves = [&] {
    if constexpr (kV == 8 && Op::kShort) {
      if (!done && halves.plain) {
        done = LaunchPlacement<PlainOf<T, Mixed>, kV / 2, Lay::kPlain, A>(stream, single, halves, &status);
      }
    }
  };
  constexpr bool kSinglesFirst = kTuned<T, U> && kOptions<Op> && Op::kInputs == 1;
  if (!kSinglesFirst) launch_halves();
  if constexpr (!std::is_same_v<T, double>) {
    using Longer = std::conditional_t<kOptions<Op>, SinglesWithOptions<Op::kInputs>,
                                      std::conditional_t<Op::kShort, SinglesOfShort, Types<>>>;
    using Singles = Joined<ShortSingles, typename FewRowsOf<T, U, Op>::Singles, Longer>;
    if (!done && elements.plain) {
      if constexpr (kTuned<T, U>) {
        done = LaunchPlacement<Singles, 1, Lay::kPlain, A>(stream, op, elements, &status);
      } else {
        done = LaunchPlacement<Singles, 1, Lay::kPlain, A>(stream, single, elements, &status);
      }
    }
  }
  if (kSinglesFirst) launch_halves();
  if (!done && packs.aligned && !packs.plain) {
    done = LaunchPlacement<typename Table::General, kV, Lay::kGeneral, A>(stream, op, packs, &status);
  }
  if (!done && shape.columns.count == 1) {
    done = LaunchPlacement<typename Table::Shifted, kV, Lay::kShifted, A>(stream, op, packs, &status);
  }
  if (!done && elements.plain) {
    done = LaunchPlacement<typename SingleTable::Plain, 1, Lay::kPlain, A>(stream, single, elements, &status);
  }
  if (!done) LaunchPlacement<typename SingleTable::General, 1, Lay::kGeneral, A>(stream, single, elements, &status);
  return status;
}

// The same for the commonest rows alone, in kernels with less to do: false unless they are plain, of adjacent elements,
// and of a tuned dtype.
template <class T, class Op, int kMore>
bool LaunchPlainRows(cudaStream_t stream, const Op& op, const RowShape<kMore>& shape, cudaError_t* status) {
  if constexpr (kTuned<T>) {
    using A = Accumulator<T>;
    constexpr int kV = kPackOf<T>;
    if (shape.across || shape.size() == 0) return false;
    const Layouts<Op::kSlots> layouts(shape, kV, Op::kBroadcasts);
    return layouts.plain &&
           LaunchPlacement<PlainOf<T, Tables<T, T, Op>, typename FewRowsOf<T, T, Op>::Packs>, kV, Lay::kPlain, A>(
               stream, op, layouts, status);
  }
  return false;
}

// XLA aligns its buffers to 128 bytes or more; packs need 16.
inline Error CheckAlignment(const char* handler, std::initializer_list<std::optional<AnyBuffer>> buffers,
                            std::initializer_list<const void*> more = {}) {
  bool aligned = true;
  for (const std::optional<AnyBuffer>& buffer : buffers) aligned &= !buffer || IsAligned(buffer->untyped_data());
  for (const void* data : more) aligned &= IsAligned(data);
  return aligned ? Error::Success() : Invalid(handler, "a buffer is not 16-byte aligned");
}

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_LAUNCH_CUH_
