// matmul on Hopper's tensor cores: wgmma, operands brought by the copy engine (TMA).
//
// A block has one warpgroup that loads and one or two that multiply. Tiles of the operands pass through a ring of
// stages in shared memory: `full` barriers say that a stage has arrived, `empty` ones that it may be filled again.
// Blocks are persistent and take tiles of the result in turn, in bands of tile rows that go back and forth, so that
// blocks which run together share operands in the L2 cache. With two warpgroups that multiply, either each takes half
// of a tile's rows (cooperative), or each takes tiles of its own and one stores its tile while the other multiplies
// (ping-pong). The parts of a product that is split along k are summed in a fixed order: by the first block of a
// cluster, which reads the others' sums from their shared memory, or, where they are many, as f32 partial results in
// memory by a kernel of its own.
#ifndef JAXOPS_OPS_MATMUL_WGMMA_CUH_
#define JAXOPS_OPS_MATMUL_WGMMA_CUH_

#include <algorithm>
#include <cstdint>

#include "core/launch.cuh"
#include "core/types.cuh"
#include "hopper/barrier.cuh"
#include "hopper/tensor_copy.cuh"
#include "hopper/wgmma.cuh"
#include "ops/matmul/epilogue.cuh"
#include "ops/matmul/problem.h"
#include "ops/matmul/wgmma_launch.h"

namespace jaxops::matmul {

using hopper::Barrier;
using hopper::kBlockBytes;
using hopper::kWarpgroup;
using hopper::Major;

enum class Schedule { kCooperative, kPingPong };

// The result's tile of one block, the warpgroups that multiply, and the stages of the ring. Less than 64 rows are for
// products of no more rows: only these are loaded; what is multiplied beyond them is never stored.
template <int kRows_, int kColumns_, int kMultipliers_, int kStages_, Schedule kSchedule_ = Schedule::kCooperative,
          int kResident_ = 1>
struct WgmmaTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kMultipliers = kMultipliers_, kStages = kStages_;
  static constexpr bool kPingPong = kSchedule_ == Schedule::kPingPong;
  static constexpr int kResident = kResident_;  // blocks of a multiprocessor
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  static constexpr bool kWhole = kRows % 64 == 0;
  static constexpr int kBlocks = kWhole ? kRows / 64 / (kPingPong ? 1 : kMultipliers) : 1;  // of 64 rows, a warpgroup
  // With more sums than these in registers there is no room for a store that is not the copy engine's.
  static constexpr bool kStoresAnyRows = kBlocks * kColumns <= 256;
  static constexpr int kLhsBytes = kRows * hopper::kBoxRowBytes, kRhsBytes = kColumns * hopper::kBoxRowBytes;
  static constexpr int kStageBytes = kLhsBytes + kRhsBytes;
  static constexpr int kStagingBytes = 2 * kBlockBytes;  // a warpgroup's results on their way out
  static constexpr int kBarrierBytes = 2 * kStages * 8;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + kMultipliers * kStagingBytes + kBarrierBytes;  // 1024: to align the stages
  // Whether clusters may sum the parts of a tile: there must be room for the sums in the ring.
  static constexpr bool kSplitsInCluster =
      !kPingPong && kBlocks * kColumns <= 128 && kMultipliers * kBlocks * 64 * kColumns * 4 <= kStages * kStageBytes;
  static_assert((kWhole || (kRows % 8 == 0 && kMultipliers == 1)) && kColumns % 64 == 0 &&
                kResident * (kSharedBytes + 1024) <= 228 << 10);
};

// What is multiplied, and how. T, V: the operands' types (float: TF32). kTerms: 1, or 3 to multiply operands that are
// split in two parts (high and low bits): low high + high low + high high. kPromotes: the tensor cores' sums, which are
// truncated at each step, are added to f32 sums in registers after every few k tiles.
template <class T_, class V_, Major kLhs_, Major kRhs_, int kTerms_ = 1, bool kPromotes_ = false>
struct Product {
  using T = T_;
  using V = V_;
  static constexpr Major kLhs = kLhs_, kRhs = kRhs_;
  static constexpr int kTerms = kTerms_;
  static constexpr bool kPromotes = kPromotes_;
  static constexpr int kDepth = hopper::kBoxRowBytes / sizeof(T);  // of a k tile
  // The parts, high 0 and low 1, that term `term` multiplies.
  static __device__ int LhsPart(int term) { return kTerms == 3 && term == 0; }
  static __device__ int RhsPart(int term) { return kTerms == 3 && term == 1; }
  // 16-bit results have the operands' type; those of 8-bit operands are bf16.
  using Narrow = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;
};

struct WgmmaArguments {
  CUtensorMap lhs, rhs, out, preactivation;
  Problem problem;
  int splits;            // of k
  int cluster;           // 1, or splits: the parts of a tile are the blocks of a cluster
  int band;              // tile rows
  int promote;           // k tiles, counted for each term, after which sums are promoted
  bool wide_out;         // results are f32
  bool boxes_out;        // results can be stored by the copy engine
  const int32_t* unfit;  // if not null and not 0: leave, another kernel does it
};

// A tile of the result and a range of k.
struct WgmmaWork {
  int row, column;
  int first, last;  // k tiles
  int batch;
  int slice;  // of out
};

template <class Tile, class P>
class WgmmaWorks {
 public:
  __device__ explicit WgmmaWorks(const WgmmaArguments& arguments)
      : arguments_(arguments),
        rows_(Ceiling(arguments.problem.m, Tile::kRows)),
        columns_(Ceiling(arguments.problem.n, Tile::kColumns)),
        depth_(Ceiling(arguments.problem.k, P::kDepth)),
        batches_(static_cast<uint32_t>(arguments.problem.batches)) {}

  // This block's works are first(), first() + step(), ... below count().
  __device__ uint32_t count() const { return per_split() * arguments_.splits; }
  __device__ uint32_t first() const {
    if (arguments_.cluster == 1) return blockIdx.x;
    return per_split() * hopper::ClusterRank() + blockIdx.x / arguments_.cluster;
  }
  __device__ uint32_t step() const { return arguments_.cluster == 1 ? gridDim.x : count(); }

  __device__ WgmmaWork At(uint32_t index) const {
    const uint32_t tiles = rows_ * columns_, band_rows = arguments_.band;
    uint32_t slice = 0, split = 0;
    if (count() > tiles) {
      slice = index / tiles;
      index -= slice * tiles;
      split = arguments_.splits == 1 ? 0 : slice / batches_;
    }
    const uint32_t per_band = band_rows * columns_, band = index / per_band, within = index - band * per_band;
    const uint32_t height = min(band_rows, rows_ - band * band_rows);
    const uint32_t column = within / height, row = band * band_rows + within - column * height;
    return {static_cast<int>(row * Tile::kRows),
            static_cast<int>((band % 2 ? columns_ - 1 - column : column) * Tile::kColumns),
            static_cast<int>(uint64_t{depth_} * split / arguments_.splits),
            static_cast<int>(uint64_t{depth_} * (split + 1) / arguments_.splits),
            static_cast<int>(slice - split * batches_),
            static_cast<int>(slice)};
  }

 private:
  static __device__ uint32_t Ceiling(int64_t size, int tile) {
    return (static_cast<uint32_t>(size) + tile - 1) / tile;  // LaunchTile has seen that all fits into 31 bits
  }
  __device__ uint32_t per_split() const { return rows_ * columns_ * batches_; }

  const WgmmaArguments& arguments_;
  const uint32_t rows_, columns_, depth_, batches_;
};

// The place in the ring: stages come round, and with each round the parity of their barriers' phase changes.
template <class Tile>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void Skip(int count) {
    const int next = stage + count;
    parity ^= next / Tile::kStages & 1;
    stage = next % Tile::kStages;
  }
};

template <class Tile>
struct Ring {
  uint32_t stages, barriers;

  __device__ uint32_t Lhs(int stage) const { return stages + stage * Tile::kStageBytes; }
  __device__ uint32_t Rhs(int stage) const { return Lhs(stage) + Tile::kLhsBytes; }
  __device__ Barrier Full(int stage) const { return {barriers + stage * 8}; }
  __device__ Barrier Empty(int stage) const { return {barriers + (Tile::kStages + stage) * 8}; }
};

// Loads kSize rows (of m or n) of an operand's k tile.
template <Major kMajor, int kSize, int kDepth>
__device__ void LoadTile(uint32_t target, const CUtensorMap& map, Barrier barrier, int first, int k_tile, int slice) {
  if constexpr (kMajor == Major::kDepth) {
    hopper::LoadBox(target, map, barrier, k_tile * kDepth, first, slice);
  } else {
#pragma unroll
    for (int block = 0; block < kSize / 64; ++block)
      hopper::LoadBox(target + block * kBlockBytes, map, barrier, first + block * 64, k_tile * kDepth, slice);
  }
}

template <class Tile, class P>
__device__ void LoadAll(const WgmmaArguments& arguments, const Ring<Tile>& ring) {
  const Problem& p = arguments.problem;
  const WgmmaWorks<Tile, P> works(arguments);
  constexpr int kParts = P::kTerms == 1 ? 1 : 2;
  RingPlace<Tile> place{0, 1};
  for (uint32_t index = works.first(); index < works.count(); index += works.step()) {
    const WgmmaWork work = works.At(index);
    int lhs = 0, rhs = 0;  // operands' matrices
    if (p.batches > 1) {
      const Offsets offsets = p.batch.At(work.batch);
      lhs = static_cast<int>(offsets.lhs / (p.m * p.k));
      rhs = static_cast<int>(offsets.rhs / (p.k * p.n));
    }
    for (int k_tile = work.first; k_tile < work.last; ++k_tile)
      for (int term = 0; term < P::kTerms; ++term) {
        ring.Empty(place.stage).Wait(place.parity);
        const Barrier full = ring.Full(place.stage);
        full.ArriveAndExpect(Tile::kStageBytes);
        LoadTile<P::kLhs, Tile::kRows, P::kDepth>(ring.Lhs(place.stage), arguments.lhs, full, work.row, k_tile,
                                                  lhs * kParts + P::LhsPart(term));
        LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(place.stage), arguments.rhs, full, work.column, k_tile,
                                                     rhs * kParts + P::RhsPart(term));
        place.Advance();
      }
  }
}

// Group kIndex of 8 sums, chosen at run time by halving: indices into registers must be constants.
template <int kFirst, int kCount, int kBlocks, int kSums>
__device__ void SelectGroup(const float (&sums)[kBlocks][kSums], int index, float (&group)[8]) {
  if constexpr (kCount == 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) group[i] = sums[kFirst / (kSums / 8)][kFirst % (kSums / 8) * 8 + i];
  } else if (index < kFirst + kCount / 2) {
    SelectGroup<kFirst, kCount / 2>(sums, index, group);
  } else {
    SelectGroup<kFirst + kCount / 2, kCount - kCount / 2>(sums, index, group);
  }
}

// A warpgroup's way from sums in registers to results in memory, 64 rows by 128 bytes at a time through shared memory.
template <class Tile, class Narrow>
class ResultStore {
 public:
  using Sums = float[Tile::kBlocks][Tile::kColumns / 2];  // as in hopper::MultiplyAdd, 64 rows a block

  __device__ ResultStore(const WgmmaArguments& arguments, uint32_t staging, int warpgroup)
      : arguments_(arguments), staging_(staging), warpgroup_(warpgroup) {}

  // The rows from `row` on and the columns of the work's tile.
  __device__ void Store(const Sums& sums, int row, const WgmmaWork& work) {
    const Problem& p = arguments_.problem;
    if (arguments_.wide_out) {
      if (p.preactivation) StoreFinished<float>(sums, row, work, true);
      StoreFinished<float>(sums, row, work, false);
    } else if (p.bias || p.activation != Activation::kNone || p.preactivation || !arguments_.boxes_out) {
      if (p.preactivation) StoreFinished<Narrow>(sums, row, work, true);
      StoreFinished<Narrow>(sums, row, work, false);
    } else {
      StorePlain(sums, row, work);
    }
  }

  __device__ void Finish() const {
    if (thread() == 0) hopper::WaitStores();
  }

 private:
  // Read anew at each use: as values that live on they would push sums out of the registers.
  static __device__ int thread() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % kWarpgroup;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }

  // The buffer to fill next, once it is free. Counted across tiles: never the one that was handed out last.
  __device__ uint32_t Acquire() {
    const uint32_t buffer = staging_ + (count_++ % 2) * kBlockBytes;
    if (arguments_.boxes_out) {
      if (thread() == 0) hopper::WaitStoresRead<1>();
      hopper::NamedSync(1 + warpgroup_, kWarpgroup);
    } else {
      __syncwarp();
    }
    return buffer;
  }
  __device__ void HandOut(const CUtensorMap& map, uint32_t buffer, int row, int column, int slice) const {
    hopper::FenceSharedForCopies();
    hopper::NamedSync(1 + warpgroup_, kWarpgroup);
    if (thread() == 0) hopper::StoreBox(map, buffer, column, row, slice);
  }

  // Sums that are only rounded: short code, unrolled.
  __device__ void StorePlain(const Sums& sums, int row, const WgmmaWork& work) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(Narrow);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int chunk = 0; chunk < Tile::kColumns / kWidth; ++chunk) {
        const uint32_t buffer = Acquire();
#pragma unroll
        for (int group = 0; group < kWidth / 16; ++group) {
          float z[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) z[i] = sums[block][chunk * kWidth / 2 + group * 8 + i];
          Stage<Narrow>(buffer, group, z);
        }
        HandOut(arguments_.out, buffer, row + block * 64, work.column + chunk * kWidth, work.slice);
      }
  }

  // Sums with bias and activation, or to rows of any alignment: long code, once, in a loop. Unrolled, it did not stay
  // in the instruction cache and took up to half of the time of a tile.
  template <class U>
  __device__ void StoreFinished(const Sums& sums, int first_row, const WgmmaWork& work, bool preactivation) {
    constexpr int kWidth = hopper::kBoxRowBytes / sizeof(U), kGroups = kWidth / 16;  // a buffer's
    const Problem& p = arguments_.problem;
    const float* const bias =
        static_cast<const float*>(p.bias) + (p.bias && p.batches > 1 ? p.batch.At(work.batch).bias : 0);
    uint32_t buffer = 0;
    ColumnBias ahead = LoadBias(bias, work.column);  // a group ahead: the load takes longer than one
#pragma unroll 1
    for (int index = 0; index < Tile::kBlocks * Tile::kColumns / 16; ++index) {
      const int row = first_row + index / (Tile::kColumns / 16) * 64, in_row = index % (Tile::kColumns / 16);
      const int group = in_row % kGroups, column = work.column + in_row * 16;
      if (group == 0) buffer = Acquire();
      float z[8];
      SelectGroup<0, Tile::kBlocks * Tile::kColumns / 16>(sums, index, z);
      const ColumnBias columns = ahead;
      ahead = LoadBias(bias, work.column + (index + 1) % (Tile::kColumns / 16) * 16);
      if (p.bias) AddBias(z, columns, bias, row, column);
      if (!preactivation) Activate(p.activation, z);
      Stage<U>(buffer, group, z);
      if (group + 1 < kGroups) continue;
      const int first = column - group * 16;
      if (arguments_.boxes_out) {
        HandOut(preactivation ? arguments_.preactivation : arguments_.out, buffer, row, first, work.slice);
      } else if constexpr (Tile::kStoresAnyRows) {
        __syncwarp();
        StoreRows(static_cast<U*>(preactivation ? p.preactivation : p.out), buffer, row, first, work.slice);
      }
    }
  }

  // A thread's part of 16 columns of a bias that is the same for all rows.
  struct ColumnBias {
    float values[4];
  };
  __device__ ColumnBias LoadBias(const float* bias, int column) const {
    const Problem& p = arguments_.problem;
    ColumnBias loaded = {};
    if (!p.bias || p.bias_row_stride != 0) return loaded;
    const int first = column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = first + i / 2 * 8 + i % 2;
      if (c < p.n) loaded.values[i] = bias[c * p.bias_column_stride];
    }
    return loaded;
  }
  // z: the thread's 8 of 16 columns, in the order of MultiplyAdd.
  __device__ void AddBias(float (&z)[8], const ColumnBias& columns, const float* bias, int row, int column) const {
    const Problem& p = arguments_.problem;
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] += columns.values[i / 4 * 2 + i % 2];
    if (p.bias_row_stride == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = row + warp() * 16 + lane() / 4 + (i & 2) * 4, c = column + lane() % 4 * 2 + i / 4 * 8 + i % 2;
      if (r < p.m && c < p.n) z[i] += bias[r * p.bias_row_stride + c * p.bias_column_stride];
    }
  }

  // Into rows with the swizzle that the copy engine expects.
  template <class U>
  static __device__ void Stage(uint32_t buffer, int group, const float (&z)[8]) {
    if constexpr (sizeof(U) == 2) {
      const auto pair = [&](int i) { return ToPack<U, 2>([&](int j) { return z[i + j]; }).words[0]; };
      const int line = warp() * 16 + lane() % 16, piece = group * 2 + lane() / 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(Place(buffer, line, piece)),
                   "r"(pair(0)), "r"(pair(2)), "r"(pair(4)), "r"(pair(6))
                   : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int line = warp() * 16 + lane() / 4 + (i & 2) * 4, at = group * 16 + lane() % 4 * 2 + i / 4 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(Place(buffer, line, at / 4) + at % 4 * 4), "f"(z[i]),
                     "f"(z[i + 1])
                     : "memory");
      }
    }
  }
  static __device__ uint32_t Place(uint32_t buffer, int line, int piece) {
    return buffer + line * hopper::kBoxRowBytes + (piece ^ line % 8) * 16;
  }

  // The warp's 16 rows of a buffer, where rows in memory are not aligned to 16 bytes: 4 bytes a lane.
  template <class U>
  __device__ void StoreRows(U* out, uint32_t buffer, int first_row, int column, int slice) const {
    const Problem& p = arguments_.problem;
    const int lane = this->lane(), left = static_cast<int>(min(p.n - column, int64_t{64}));
    const int rows = static_cast<int>(min(p.m - first_row - warp() * 16, int64_t{16}));
    U* to = out + (slice * p.m + first_row + warp() * 16) * p.n + column;
#pragma unroll 4
    for (int row = 0; row < rows; ++row, to += p.n) {
      uint32_t word;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(word)
                   : "r"(Place(buffer, warp() * 16 + row, lane / 4) + lane % 4 * 4)
                   : "memory");
      if constexpr (sizeof(U) == 4) {
        if (lane < left) to[lane] = __uint_as_float(word);
      } else {
        const uint32_t next = __shfl_down_sync(~0u, word, 1);
        const int odd = reinterpret_cast<uintptr_t>(to) / 2 % 2;  // then aligned pairs begin with a word's upper half
        const int at = lane * 2 + odd;
        if (odd && lane == 0 && left > 0) to[0] = reinterpret_cast<const U&>(word);
        if (odd) word = word >> 16 | next << 16;
        if (at + 1 < left && at < 63) {
          *reinterpret_cast<uint32_t*>(to + at) = word;
        } else if (at < left) {
          to[at] = reinterpret_cast<const U&>(word);
        }
      }
    }
  }

  const WgmmaArguments& arguments_;
  const uint32_t staging_;
  const int warpgroup_;
  uint32_t count_ = 0;
};

// Adds the sums of the cluster's other blocks, in the order of their ranks, to those of the first; true there. The ring
// is free: each block has one work.
template <class Tile>
__device__ bool SumCluster(const WgmmaArguments& arguments, uint32_t ring, int warpgroup,
                           float (&sums)[Tile::kBlocks][Tile::kColumns / 2]) {
  constexpr int kCount = Tile::kColumns / 2;
  const auto place = [&](int block, int i) {
    return ring + (((warpgroup * Tile::kBlocks + block) * kCount + i) * kWarpgroup + threadIdx.x % kWarpgroup) * 4;
  };
  const bool first = hopper::ClusterRank() == 0;
  if (!first) {
    hopper::NamedSync(3, Tile::kMultipliers * kWarpgroup);  // all have multiplied what was there
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < kCount; ++i) hopper::StoreShared(place(block, i), sums[block][i]);
  }
  hopper::ClusterArrive();
  hopper::ClusterWait();
  if (first) {
    for (int rank = 1; rank < arguments.cluster; ++rank)
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[block][i] += hopper::LoadFrom(rank, place(block, i));
  }
  hopper::ClusterArrive();  // see WgmmaMatmul for the wait
  return first;
}

template <bool kSecond, class T>
__device__ T& Either(T& first, T& second) {
  if constexpr (kSecond) {
    return second;
  } else {
    return first;
  }
}

template <class Tile, class P>
__device__ void MultiplyAll(const WgmmaArguments& arguments, const Ring<Tile>& ring, uint32_t staging, int warpgroup) {
  using T = typename P::T;
  using V = typename P::V;
  constexpr int kBlocks = Tile::kBlocks, kColumns = Tile::kColumns;
  const WgmmaWorks<Tile, P> works(arguments);
  ResultStore<Tile, typename P::Narrow> store(arguments, staging, warpgroup);
  RingPlace<Tile> place;
  float sums[kBlocks][kColumns / 2];
  float promoted[kBlocks][kColumns / 2];  // not used, hence no registers, without promotion
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) ring.Empty(stage).Arrive();
  };
  // Ping-pong: barrier 4 + w is warpgroup w's turn to multiply; the first one's comes first.
  constexpr int kTurn = 4;
  if (Tile::kPingPong && warpgroup == 1) hopper::NamedArrive(kTurn, 2 * kWarpgroup);
  int turn = 0;
  for (uint32_t index = works.first(); index < works.count(); index += works.step(), turn ^= 1) {
    const WgmmaWork work = works.At(index);
    const int depth = (work.last - work.first) * P::kTerms;
    if (Tile::kPingPong && turn != warpgroup) {
      place.Skip(depth);
      continue;
    }
    if constexpr (Tile::kPingPong) hopper::NamedSync(kTurn + warpgroup, 2 * kWarpgroup);
    if constexpr (P::kPromotes) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) promoted[block][i] = 0;
    }
    const int first_block = Tile::kPingPong ? 0 : warpgroup * kBlocks;
    int pending = -1;   // the stage of the products that may still be running
    bool fresh = true;  // the sums are to be overwritten
    int since = 0;      // k tiles since the sums were promoted
    for (int i = 0; i < depth; ++i) {
      ring.Full(place.stage).Wait(place.parity);
      const uint64_t lhs = hopper::Descriptor(ring.Lhs(place.stage) + first_block * kBlockBytes);
      const uint64_t rhs = hopper::Descriptor(ring.Rhs(place.stage));
      hopper::FenceRegisters();
#pragma unroll
      for (int step = 0; step < hopper::kSteps; ++step)
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
          hopper::MultiplyAdd<T, V, kColumns, P::kLhs, P::kRhs>(
              sums[block], lhs + (block * kBlockBytes + step * hopper::kStepBytes<P::kLhs>) / 16,
              rhs + step * hopper::kStepBytes<P::kRhs> / 16, step || !fresh);
      hopper::CommitProducts();
      fresh = false;
      if (pending >= 0) {
        hopper::WaitProducts<1>();
        release(pending);
      }
      pending = place.stage;
      place.Advance();
      if constexpr (P::kPromotes) {
        if (++since == arguments.promote || i + 1 == depth) {
          hopper::WaitProducts<0>();
          release(pending);
#pragma unroll
          for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int j = 0; j < kColumns / 2; ++j) promoted[block][j] += sums[block][j];
          pending = -1, fresh = true, since = 0;
        }
      }
    }
    if constexpr (Tile::kPingPong) hopper::NamedArrive(kTurn + 1 - warpgroup, 2 * kWarpgroup);
    hopper::WaitProducts<0>();
    if (pending >= 0) release(pending);
    auto& results = Either<P::kPromotes>(sums, promoted);
    if constexpr (Tile::kSplitsInCluster) {
      if (arguments.cluster > 1 && !SumCluster<Tile>(arguments, ring.stages, warpgroup, results)) break;
    }
    store.Store(results, work.row + first_block * 64, work);
  }
  store.Finish();
}

// Registers a thread: 65,536 for a block's warpgroups, in steps of 8. With one warpgroup that multiplies there are
// enough without moving any.
inline constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;

template <class Tile, class P>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    WgmmaMatmul(const __grid_constant__ WgmmaArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (arguments.unfit && *arguments.unfit) return;
  extern __shared__ uint8_t shared[];
  const uint32_t stages = (hopper::SharedAddress(shared) + 1023) & ~1023u;
  const uint32_t staging = stages + Tile::kStages * Tile::kStageBytes;
  const Ring<Tile> ring = {stages, staging + Tile::kMultipliers * Tile::kStagingBytes};
  if (threadIdx.x == 0) {
    hopper::Prefetch(arguments.lhs);
    hopper::Prefetch(arguments.rhs);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      ring.Full(stage).Initialize(1);
      ring.Empty(stage).Initialize(4 * (Tile::kPingPong ? 1 : Tile::kMultipliers));  // a warp each
    }
    hopper::FenceBarriers();
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    if constexpr (Tile::kMultipliers == 2) hopper::ReleaseRegisters<kLoaderRegisters>();
    if (threadIdx.x == 0) LoadAll<Tile, P>(arguments, ring);
    if (Tile::kSplitsInCluster && arguments.cluster > 1) {  // as the others do in SumCluster
      hopper::ClusterArrive();
      hopper::ClusterWait();
      hopper::ClusterArrive();
    }
  } else {
    if constexpr (Tile::kMultipliers == 2) hopper::AcquireRegisters<kMultiplierRegisters>();
    MultiplyAll<Tile, P>(arguments, ring, staging + (warpgroup - 1) * Tile::kStagingBytes, warpgroup - 1);
  }
  if (Tile::kSplitsInCluster && arguments.cluster > 1)
    hopper::ClusterWait();  // nobody leaves while its sums may be read
#endif
}

// out = activation(the sum of the partial results, in order, + bias). A block takes 32 packs of 4 adjacent elements; a
// warp sums every 8th partial result, the first warp their sums.
inline constexpr int kPartialCount = 4, kPartialWarps = 8;
template <class U>
__global__ void __launch_bounds__(kPartialWarps * 32) SumPartials(const Problem p, const float* partials, int splits) {
  __shared__ float4 sums[kPartialWarps][32];
  const int64_t packs = (p.n + kPartialCount - 1) / kPartialCount, size = p.batches * p.m * p.n;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index = blockIdx.x * int64_t{32} + lane, line = index / packs;
  const int64_t column = (index - line * packs) * kPartialCount, batch = line / p.m;
  const bool inside = line < p.batches * p.m;
  float4 sum = {};
  if (inside) {
    const float* const from = partials + line * p.n + column;
#pragma unroll 4
    for (int split = warp; split < splits; split += kPartialWarps) {
      const float* const values = from + split * size;
      float4 add = {};
      if (p.n % kPartialCount == 0) {
        add = *reinterpret_cast<const float4*>(values);
      } else {
        add.x = values[0];
        if (column + 1 < p.n) add.y = values[1];
        if (column + 2 < p.n) add.z = values[2];
        if (column + 3 < p.n) add.w = values[3];
      }
      sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || !inside) return;
#pragma unroll
  for (int i = 1; i < kPartialWarps; ++i) {
    const float4 add = sums[i][lane];
    sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
  }
  const float values[kPartialCount] = {sum.x, sum.y, sum.z, sum.w};
  StoreRow<U>(p, batch, p.bias ? p.batch.At(batch).bias : 0, line - batch * p.m, column, values);
}

template <class T>
inline constexpr CUtensorMapDataType kCopyType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
template <>
inline constexpr CUtensorMapDataType kCopyType<__nv_bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType kCopyType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kCopyType<float> = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

template <class T>
hopper::TensorView View(const WgmmaOperand& operand, Major major, int64_t space, int64_t depth, int tile) {
  const bool along_depth = major == Major::kDepth;
  return {operand.data,
          kCopyType<T>,
          sizeof(T),
          along_depth ? depth : space,
          along_depth ? space : depth,
          operand.slices,
          operand.stride,
          along_depth ? tile : static_cast<int>(hopper::kBoxRowBytes / sizeof(T))};
}

inline bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

template <class Tile, class P>
  requires(Tile::kWhole || P::kLhs == Major::kDepth)
cudaError_t LaunchTile(cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  using T = typename P::T;
  using V = typename P::V;
  const bool split = plan.partials != nullptr, wide = split || plan.wide_out;
  const bool in_cluster = plan.splits > 1 && !split;
  if ((in_cluster && !Tile::kSplitsInCluster) || (!Tile::kWhole && p.m > Tile::kRows)) return cudaErrorNotSupported;
  WgmmaArguments arguments = {};
  arguments.problem = p;
  arguments.splits = plan.splits;
  arguments.cluster = in_cluster ? plan.splits : 1;
  arguments.band = plan.band;
  arguments.promote = plan.promote;
  arguments.wide_out = wide;
  arguments.unfit = plan.unfit;
  Problem& q = arguments.problem;
  if (split) {
    q.out = plan.partials;
    q.bias = q.preactivation = nullptr;
    q.activation = Activation::kNone;
  }
  cudaError_t status = hopper::Describe(View<T>(plan.lhs, P::kLhs, p.m, p.k, Tile::kRows), &arguments.lhs);
  if (status == cudaSuccess)
    status = hopper::Describe(View<V>(plan.rhs, P::kRhs, p.n, p.k, Tile::kColumns), &arguments.rhs);
  const int out_bytes = wide ? 4 : 2;
  arguments.boxes_out = p.n * out_bytes % 16 == 0 && IsAligned(q.out) && IsAligned(q.preactivation);
  if (!arguments.boxes_out && !Tile::kStoresAnyRows) return cudaErrorNotSupported;
  if (arguments.boxes_out && status == cudaSuccess) {
    hopper::TensorView view = {q.out,     wide ? kCopyType<float> : kCopyType<typename P::Narrow>,
                               out_bytes, p.n,
                               p.m,       p.batches * (split ? plan.splits : 1),
                               p.n,       64};
    status = hopper::Describe(view, &arguments.out);
    if (q.preactivation && status == cudaSuccess) {
      view.data = q.preactivation;
      status = hopper::Describe(view, &arguments.preactivation);
    }
  }
  if (status != cudaSuccess) return status;
  int device = 0, multiprocessors = 0;
  status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const auto tiles = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const int64_t works = tiles(p.m, Tile::kRows) * tiles(p.n, Tile::kColumns) * p.batches * plan.splits;
  if (std::max({p.m, p.n, p.k}) > kMost - 512 || works > kMost / 2) return cudaErrorNotSupported;
  status = Launch(stream, WgmmaMatmul<Tile, P>,
                  {in_cluster ? works : std::min<int64_t>(works, multiprocessors * Tile::kResident), Tile::kThreads,
                   arguments.cluster, Tile::kSharedBytes},
                  arguments);
  if (!split || status != cudaSuccess) return status;
  const int64_t packs = p.batches * p.m * tiles(p.n, kPartialCount);
  const Grid grid = {tiles(packs, 32), kPartialWarps * 32};
  return plan.wide_out ? Launch(stream, SumPartials<float>, grid, p, plan.partials, plan.splits)
                       : Launch(stream, SumPartials<typename P::Narrow>, grid, p, plan.partials, plan.splits);
}

// Rows along m are loaded 64 at a time.
template <class Tile, class P>
cudaError_t LaunchTile(cudaStream_t, const Problem&, const WgmmaPlan&) {
  return cudaErrorNotSupported;
}

// The tile of the plan among Tiles.
template <class P, class... Tiles>
cudaError_t LaunchPlanned(Types<Tiles...>, cudaStream_t stream, const Problem& p, const WgmmaPlan& plan) {
  cudaError_t status = cudaErrorNotSupported;
  (void)((plan.tile_rows == Tiles::kRows && plan.tile_columns == Tiles::kColumns &&
          plan.ping_pong == Tiles::kPingPong && (status = LaunchTile<Tiles, P>(stream, p, plan), true)) ||
         ...);
  return status;
}

using WgmmaTiles =
    Types<WgmmaTile<32, 64, 1, 7, Schedule::kCooperative, 2>, WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 128, 1, 8>,
          WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 128, 2, 6, Schedule::kPingPong>,
          WgmmaTile<128, 192, 2, 4, Schedule::kPingPong>, WgmmaTile<128, 256, 2, 4>, WgmmaTile<256, 192, 2, 3>>;
// Promoted sums take twice the registers.
using PromotedTiles =
    Types<WgmmaTile<64, 64, 1, 12>, WgmmaTile<64, 128, 1, 8>, WgmmaTile<128, 128, 2, 6>, WgmmaTile<128, 192, 2, 4>>;

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_WGMMA_CUH_
