// Flash attention's backward pass on Hopper, with the same bits in every run.
//
// A block owns 128 keys in a head, 64 for each of two warpgroups, and visits the queries that see them, one query head
// after the other. Everything is transposed: S^T = K Q^T and dP^T = V dO^T come from shared memory, so that P^T =
// exp(S^T - lse) and dS^T = P^T (dP^T - delta) are register operands for dV += P^T dO and dK += dS^T Q, which stay in
// registers. dS^T also goes through shared memory to dQ = dS K. A warp in the first warpgroup adds the parts of dQ, by
// the copy engine, to sums in memory.
//
// These additions have an order: key blocks add to a query block one after the other, and each query block has a
// counter that says whose turn it is. Blocks arrive in this order anyway. They take their keys by tickets from another
// counter and wait only for smaller tickets, whose blocks run already: there is no deadlock, whatever else the GPU
// does. Under a diagonal mask, heads follow each other, the last keys come first, and a block's additions begin at the
// diagonal just after its right neighbour's; otherwise keys ascend, heads fastest.
#ifndef JAXOPS_OPS_ATTENTION_BACKWARD_CUH_
#define JAXOPS_OPS_ATTENTION_BACKWARD_CUH_

#include <cstdint>

#include "core/shared_memory.cuh"
#include "ops/attention/backward_sums.cuh"
#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"
#include "ops/attention/scores.cuh"

namespace jaxops::attention {

// Facts about a key block: the loader passes them through shared memory, and the other warps read them anew at each
// use. Kept alive, they would push sums out of the registers.
enum TileField : int {
  kBatch,
  kKeyHead,
  kFirstKey,
  kFirstBlock,  // query blocks, as in Span
  kLastBlock,
  kWholeFirst,  // for the first and the second warpgroup
  kWholeLast = kWholeFirst + 2,
  kHalf = kWholeLast + 2,  // 1: the first block sees no key of the second warpgroup
  kBandQueries,
  kBandKeys,
  kBandLeft,
  kBandRight,
  kTileFields
};

template <class T_, int kDepth_, bool kGeneral_>
struct BackwardTile {
  using T = T_;
  static constexpr int kDepth = kDepth_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kKeys = 128, kQueries = QueriesAtOnce(kDepth), kStages = 2, kThreads = 3 * kWarpgroup;
  // A warpgroup's part of dQ is 64 x 64: half of the depth, or half of the queries.
  static constexpr bool kSplitsDepth = kDepth == 128;
  // With 128 queries dV's product is issued only when dS is there: fewer registers are live.
  static constexpr bool kLateValues = kDepth == 64;
  static constexpr int kStaging = kGeneral ? 1 : 2;  // dQ buffers, and dK buffers, per warpgroup
  static constexpr int kKeyBytes = kKeys * kDepth * 2, kQueryBytes = kQueries * kDepth * 2;
  static constexpr int kScoreBytes = kKeys * kQueries * 2, kPartBytes = kPartFloats * 4;
  static constexpr int kExtraBytes = kKeys * kQueries * 2, kExtraStages = !kGeneral ? 0 : kDepth == 64 ? 1 : 2;
  static constexpr int kBarriers = 2 + 4 * kStages + 4 * kStaging + 4 + 2 * kExtraStages;
  static constexpr int kSharedBytes = 2 * kKeyBytes + 2 * kStages * kQueryBytes + 2 * kScoreBytes +
                                      2 * kStaging * kPartBytes + kExtraStages * kExtraBytes +
                                      2 * kStages * kQueries * 4 + kBarriers * 8 + 2 * kTileFields * 4;
  static_assert(kSharedBytes <= 232448 && kDepth / 64 <= 2 && 64 * kDepth * 2 <= kPartBytes);
  static constexpr int kLoaderRegisters = kLateValues ? 40 : 24, kConsumerRegisters = kLateValues ? 232 : 240;
};

struct BackwardArguments {
  CUtensorMap q, k, v, dout, dk, dv, extra;  // dk, dv: in boxes with 64 rows
  Problem problem;                           // key_heads: as many as dk and dv have
  int sharing;                               // so many of these read the same keys and values
  float *wide_dk, *wide_dv;                  // where dk and dv go unrounded instead, to be summed; or null
  BackwardSums sums;
  int together;     // heads whose keys are taken together
  Fetched fetched;  // as `extra`
};

struct KnownTile {
  uint32_t address;

  __device__ int operator[](int field) const {
    int value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address + field * 4) : "memory");
    return value;
  }
  __device__ void Set(int field, int value) const { StoreShared(address + field * 4, value); }
  __device__ Band band(const Problem& p) const {
    return Band(p, (*this)[kBandQueries], (*this)[kBandKeys], (*this)[kBandLeft], (*this)[kBandRight]);
  }
};

template <class Tile>
struct BackwardShared {
  uint32_t base;

  __device__ uint32_t Keys() const { return base; }
  __device__ uint32_t Values() const { return base + Tile::kKeyBytes; }
  __device__ uint32_t Queries(int stage) const { return base + 2 * Tile::kKeyBytes + stage * Tile::kQueryBytes; }
  __device__ uint32_t Cotangents(int stage) const { return Queries(Tile::kStages + stage); }
  __device__ uint32_t Scores(int buffer) const { return Queries(2 * Tile::kStages) + buffer * Tile::kScoreBytes; }
  __device__ uint32_t Part(int group, int buffer) const {
    return Scores(2) + (group * Tile::kStaging + buffer) * Tile::kPartBytes;
  }
  __device__ uint32_t Extra(int stage) const { return Part(2, 0) + stage * Tile::kExtraBytes; }
  __device__ uint32_t Lse(int stage) const { return Extra(Tile::kExtraStages) + stage * Tile::kQueries * 8; }
  __device__ uint32_t Delta(int stage) const { return Lse(stage) + Tile::kQueries * 4; }
  __device__ Barrier KeysFull() const { return At(0); }  // and values
  __device__ Barrier KeysEmpty() const { return At(1); }
  __device__ Barrier QueriesFull(int stage) const { return At(2 + stage); }
  __device__ Barrier QueriesEmpty(int stage) const { return At(2 + Tile::kStages + stage); }
  __device__ Barrier CotangentsFull(int stage) const { return At(2 + 2 * Tile::kStages + stage); }
  __device__ Barrier CotangentsEmpty(int stage) const { return At(2 + 3 * Tile::kStages + stage); }
  __device__ Barrier PartFull(int group, int buffer) const {
    return At(2 + 4 * Tile::kStages + group * Tile::kStaging + buffer);
  }
  __device__ Barrier PartEmpty(int group, int buffer) const { return PartFull(2 + group, buffer); }
  // The tiles to come, two deep.
  __device__ Barrier TileKnown(int slot) const { return PartFull(4, slot); }
  __device__ Barrier TileRead(int slot) const { return PartFull(4, 2 + slot); }
  __device__ Barrier ExtraFull(int stage) const { return PartFull(4, 4 + stage); }
  __device__ Barrier ExtraEmpty(int stage) const { return ExtraFull(Tile::kExtraStages + stage); }
  __device__ uint32_t Slot(int slot) const { return At(Tile::kBarriers).address + slot * kTileFields * 4; }

  __device__ void Initialize() const {
    KeysFull().Initialize(1);
    KeysEmpty().Initialize(8 * kWarpArrivals);
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      QueriesFull(stage).Initialize(1);
      CotangentsFull(stage).Initialize(1);
      QueriesEmpty(stage).Initialize(8 * kWarpArrivals);
      CotangentsEmpty(stage).Initialize(8 * kWarpArrivals);
    }
    for (int group = 0; group < 2; ++group)
      for (int buffer = 0; buffer < Tile::kStaging; ++buffer) {
        PartFull(group, buffer).Initialize(4 * kWarpArrivals);
        PartEmpty(group, buffer).Initialize(1);
      }
    for (int stage = 0; stage < Tile::kExtraStages; ++stage) {
      ExtraFull(stage).Initialize(1);
      ExtraEmpty(stage).Initialize(8 * kWarpArrivals);
    }
    for (int slot = 0; slot < 2; ++slot) {
      TileKnown(slot).Initialize(1);
      TileRead(slot).Initialize(11 * kWarpArrivals);  // 8 warps that multiply, 2 that add, the one that loads keys
    }
    hopper::FenceBarriers();
  }
  // Calls visit(tile, its number in this block) for each tile of the block; by all threads of a warp.
  template <class Visit>
  __device__ void ForEachTile(const Visit& visit) const {
    for (int k = 0;; ++k) {
      TileKnown(k & 1).Wait((k >> 1) & 1);
      const KnownTile tile = {Slot(k & 1)};
      if (tile[kBatch] < 0) return;
      visit(tile, k);
      __syncwarp();
      TileRead(k & 1).ArriveForWarp(threadIdx.x % 32 == 0);
    }
  }

 private:
  __device__ Barrier At(int index) const { return {Lse(Tile::kStages) + 8 * index}; }
};

// Key blocks in ticket order.
template <class Tile>
struct KeyTiles {
  const BackwardArguments& arguments;
  int blocks, total;  // per head, and in all

  struct Place {
    int batch, head, block;  // a key head

    __device__ int key() const { return block * Tile::kKeys; }
  };

  explicit __device__ KeyTiles(const BackwardArguments& arguments)
      : arguments(arguments), blocks((arguments.problem.keys + Tile::kKeys - 1) / Tile::kKeys) {
    total = arguments.problem.batches * arguments.problem.key_heads * blocks;
  }
  __device__ Place At(int ticket) const {
    const Problem& p = arguments.problem;
    int head, block;
    if (arguments.sums.descending) {
      head = ticket / blocks;
      block = blocks - 1 - (ticket - head * blocks);
    } else {
      const int group = ticket / (arguments.together * blocks), within = ticket - group * arguments.together * blocks;
      const int first = group * arguments.together, heads = min(arguments.together, p.batches * p.key_heads - first);
      block = within / heads;
      head = first + within - block * heads;
    }
    const int batch = head / p.key_heads;
    return {batch, head - batch * p.key_heads, block};
  }
  // The query blocks that see them; whole: the blocks that see all 64 keys from `key` on.
  __device__ Span Visited(const Band& band, const Place& at, int key) const {
    Span span = band.QueryBlocks<Tile::kQueries>(at.key(), Tile::kKeys);
    const Span own = band.QueryBlocks<Tile::kQueries>(key, 64);
    span.whole_first = own.whole_first;
    span.whole_last = own.whole_last;
    const Reach& reach = arguments.sums.reach;
    if (reach.of_keys) {
      const Problem& p = arguments.problem;
      const int64_t line = reach.Line(at.batch, at.head);
      const int2 tile = reach.key_blocks[line * blocks + at.block];
      span.first = max(span.first, tile.x);
      span.last = min(span.last, tile.y);
      if (key < p.keys) {
        const Span half = reach.key_spans[line * ((p.keys + 63) / 64) + key / 64].template Blocks<Tile::kQueries>();
        span.whole_first = max(span.whole_first, half.whole_first);
        span.whole_last = min(span.whole_last, half.whole_last);
      }
    }
    return span.Ordered();
  }
};

// Takes tickets, announces their tiles, and loads queries and their cotangents. Registers are few here, too.
template <class Tile>
__device__ void LoadQueries(const BackwardArguments& arguments, const BackwardShared<Tile>& shared) {
  constexpr int kQueries = Tile::kQueries, kDepth = Tile::kDepth;
  const Problem& p = arguments.problem;
  int steps = 0;  // so far
  for (int k = 0;; ++k) {
    const KnownTile tile = {shared.Slot(k & 1)};
    {
      const KeyTiles<Tile> tiles(arguments);
      const int ticket = atomicAdd(arguments.sums.tickets, 1);
      shared.TileRead(k & 1).Wait(((k >> 1) & 1) ^ 1);
      if (ticket >= tiles.total) {
        tile.Set(kBatch, -1);
        shared.TileKnown(k & 1).Arrive();
        return;
      }
      const auto at = tiles.At(ticket);
      const Band band(p, at.batch);
      const Span span = tiles.Visited(band, at, at.key()), second = tiles.Visited(band, at, at.key() + 64);
      tile.Set(kBatch, at.batch);
      tile.Set(kKeyHead, at.head);
      tile.Set(kFirstKey, at.key());
      tile.Set(kFirstBlock, span.first);
      tile.Set(kLastBlock, span.last);
      tile.Set(kWholeFirst, span.whole_first);
      tile.Set(kWholeLast, span.whole_last);
      tile.Set(kWholeFirst + 1, second.whole_first);
      tile.Set(kWholeLast + 1, second.whole_last);
      tile.Set(kHalf, Tile::kSplitsDepth && (span.first + 1) * kQueries + band.right <= at.key() + 64);
      tile.Set(kBandQueries, band.queries);
      tile.Set(kBandKeys, band.keys);
      tile.Set(kBandLeft, band.left);
      tile.Set(kBandRight, band.right);
      shared.TileKnown(k & 1).Arrive();
    }
    for (int member = 0; member < p.group(); ++member) {
      const int head = tile[kKeyHead] * p.group() + member, batch = tile[kBatch];
      const int line = (batch * p.heads + head) * arguments.sums.blocks;
      const int last = tile[kLastBlock];
      for (int block = tile[kFirstBlock]; block < last; ++block, ++steps) {
        const int stage = steps % Tile::kStages;
        const uint32_t parity = steps / Tile::kStages & 1 ^ 1;
        shared.QueriesEmpty(stage).Wait(parity);
        const Barrier full = shared.QueriesFull(stage);
        full.ArriveAndExpect(Tile::kQueryBytes + kQueries * 8);
        LoadTile<kQueries, kDepth>(shared.Queries(stage), arguments.q, full, block * kQueries, head, batch);
        hopper::LoadBytes(shared.Lse(stage), arguments.sums.statistics + int64_t{line + block} * (2 * kQueries),
                          kQueries * 8, full);
        if constexpr (Tile::kExtraStages > 0) {
          if (arguments.fetched != Fetched::kNothing) {
            const int at_stage = steps % Tile::kExtraStages;
            const Barrier extra_full = shared.ExtraFull(at_stage);
            shared.ExtraEmpty(at_stage).Wait((steps / Tile::kExtraStages & 1) ^ 1);
            extra_full.ArriveAndExpect(ExtraBytes<kQueries>(arguments.fetched));
            const Broadcast& from = arguments.fetched == Fetched::kBias ? p.bias : p.mask;
            LoadExtra<kQueries, Tile::kKeys>(shared.Extra(at_stage), arguments.extra, extra_full, arguments.fetched,
                                             block * kQueries, tile[kFirstKey], from.head_stride ? head : 0,
                                             from.batch_stride ? batch : 0);
          }
        }
        shared.CotangentsEmpty(stage).Wait(parity);
        const Barrier cotangents_full = shared.CotangentsFull(stage);
        cotangents_full.ArriveAndExpect(Tile::kQueryBytes);
        LoadTile<kQueries, kDepth>(shared.Cotangents(stage), arguments.dout, cotangents_full, block * kQueries, head,
                                   batch);
      }
    }
  }
}

// A separate warp loads the keys. Otherwise the next tile's queries would wait until this tile's keys are no longer
// needed.
template <class Tile>
__device__ void LoadKeys(const BackwardArguments& arguments, const BackwardShared<Tile>& shared) {
  shared.ForEachTile([&](const KnownTile& tile, int k) {
    if (threadIdx.x % 32 != 0) return;
    const Barrier full = shared.KeysFull();
    const int key = tile[kFirstKey], head = tile[kKeyHead] / arguments.sharing, batch = tile[kBatch];
    if (k > 0) {  // the previous tile's keys and values are still in use
#pragma unroll
      for (int column = 0; column < Tile::kDepth; column += 64) {
        hopper::PrefetchHeadBox(arguments.k, column, key, head, batch);
        hopper::PrefetchHeadBox(arguments.v, column, key, head, batch);
      }
    }
    shared.KeysEmpty().Wait((k & 1) ^ 1);
    full.ArriveAndExpect(2 * Tile::kKeyBytes);
    LoadTile<Tile::kKeys, Tile::kDepth>(shared.Keys(), arguments.k, full, key, head, batch);
    LoadTile<Tile::kKeys, Tile::kDepth>(shared.Values(), arguments.v, full, key, head, batch);
  });
}

// Each of two warps adds one warpgroup's dQ parts to the sums in memory, each in its turn; the first block stores its
// part instead. This must take less time than a step. The warp also stores the warpgroup's dK and dV, unless they stay
// unrounded.
template <class Tile>
__device__ void AddParts(const BackwardArguments& arguments, const BackwardShared<Tile>& shared, int group) {
  constexpr int kQueries = Tile::kQueries, kKeys = Tile::kKeys;
  const Problem& p = arguments.problem;
  const BackwardSums& sums = arguments.sums;
  const bool lead = threadIdx.x % 32 == 0;
  int parts = 0;  // so far
  shared.ForEachTile([&](const KnownTile& tile, int) {
    if (!lead) return;
    const int first = tile[kFirstBlock], last = tile[kLastBlock];
    const auto turn_at = [&](int block) {
      const Span keys = sums.KeyBlocksOf<kKeys, kQueries>(tile.band(p), tile[kBatch], tile[kKeyHead], block);
      const int own = tile[kFirstKey] / kKeys;
      return sums.descending ? keys.last - 1 - own : own - keys.first;
    };
    for (int member = 0; member < p.group(); ++member) {
      const int line = (tile[kBatch] * p.heads + tile[kKeyHead] * p.group() + member) * sums.blocks;
      int32_t* const turns = sums.turns + int64_t{line} * 2 + group;
      const auto is_turn = [&](int block, int turn) {
        int done;
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(done) : "l"(turns + 2 * block) : "memory");
        return done == turn;
      };
      int turn = first < last ? turn_at(first) : 0;
      bool ready = false;  // it is this block's turn, and the copy engine may act on it
      for (int block = first; block < last; ++block, ++parts) {
        const int buffer = parts % Tile::kStaging;
        const uint32_t part = shared.Part(group, buffer);
        if (!ready) {
          while (!is_turn(block, turn)) {
          }
          hopper::FenceCopies();
        }
        shared.PartFull(group, buffer).Wait((parts / Tile::kStaging) & 1);
        float* const sum = sums.dq + int64_t{line + block} * (2 * kPartFloats) + group * kPartFloats;
        if (turn == 0) {
          hopper::StoreFloats(sum, part, Tile::kPartBytes);
        } else {
          hopper::AddFloats(sum, part, Tile::kPartBytes);
        }
        hopper::CommitStores();
        // Look ahead during the addition: waiting for its end, handing on and only then looking at the next counter
        // takes as long as the products. One fence covers the finished addition and the counter that was read.
        const int next_turn = block + 1 < last ? turn_at(block + 1) : 0;
        ready = block + 1 < last && is_turn(block + 1, next_turn);
        hopper::WaitStores();
        hopper::FenceCopies();
        asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(turns + 2 * block), "r"(turn + 1) : "memory");
        shared.PartEmpty(group, buffer).Arrive();
        turn = next_turn;
      }
    }
    const int buffer = parts % Tile::kStaging;
    shared.PartFull(group, buffer).Wait((parts / Tile::kStaging) & 1);
    const int key = tile[kFirstKey] + 64 * group, head = tile[kKeyHead], batch = tile[kBatch];
    if (!arguments.wide_dk) {
      StoreTile<64, Tile::kDepth>(arguments.dk, shared.Part(group, buffer), key, head, batch);
      StoreTile<64, Tile::kDepth>(arguments.dv, shared.Scores(0) + group * 64 * hopper::kBoxRowBytes, key, head, batch,
                                  Tile::kScoreBytes);
      hopper::CommitStores();
      hopper::WaitStoresRead<0>();
    }
    shared.PartEmpty(group, buffer).Arrive();
    ++parts;
  });
}

// Writes a warpgroup's sums to [batches, keys, key heads, depth]. key: this thread's first.
template <int kCount>
__device__ void StoreWide(float* result, const float (&sums)[kCount], const Problem& p, int key, int head, int batch) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (key + 8 * h >= p.keys) continue;
    float* const row = result + ((int64_t{batch} * p.keys + key + 8 * h) * p.key_heads + head) * p.depth;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      if (const int at = 8 * i + column; at < p.depth)
        *reinterpret_cast<float2*>(row + at) = {sums[4 * i + 2 * h], sums[4 * i + 2 * h + 1]};
  }
}

template <class Tile>
__device__ void AttendBackward(const BackwardArguments& arguments, const BackwardShared<Tile>& shared, int group) {
  using T = typename Tile::T;
  constexpr int kDepth = Tile::kDepth, kKeys = Tile::kKeys, kQueries = Tile::kQueries, kStages = Tile::kStages;
  constexpr int kKeyChunk = kChunk<kKeys>, kQueryChunk = kChunk<kQueries>;
  constexpr int kBoth = 1, kOwn = 2;  // named barriers
  const Problem& p = arguments.problem;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, column = lane % 4 * 2;
  const bool lead = lane == 0;
  const float factor = p.scale * kLog2E;
  float dk[kDepth / 2], dv[kDepth / 2], scores[kQueries / 2], dscores[kQueries / 2];
  uint32_t rounded[kQueries / 4], drounded[kQueries / 4];
  const uint32_t keys = shared.Keys() + group * 64 * hopper::kBoxRowBytes;
  const uint32_t values = shared.Values() + group * 64 * hopper::kBoxRowBytes;
  int steps = 0;  // so far
  shared.ForEachTile([&](const KnownTile& tile, int k) {
    // Each step and each tile hands parts on. The next part's buffer is free once the part in it has been stored.
    const auto part_buffer = [&] { return (steps + k) % Tile::kStaging; };
    const auto await_place = [&](int parts) {
      shared.PartEmpty(group, parts % Tile::kStaging).Wait((parts / Tile::kStaging & 1) ^ 1);
    };
    // The previous tile's dV has left the space for dS, which this tile's dV takes too, even after no step.
    const auto await_values = [&] { await_place(steps + k - 1 + Tile::kStaging); };
    const auto own_key = [&] { return tile[kFirstKey] + 64 * group + warp * 16 + lane / 4; };
    int accumulate = 0;  // the first products overwrite dk and dv: zeros before them would serialise all (C7515)
    shared.KeysFull().Wait(k & 1);
    if (const int seen = tile[kBandKeys] - tile[kFirstKey]; p.key_lengths && seen < kKeys) {
      ClearRows<kKeys, kDepth>(shared.Keys(), seen);
      ClearRows<kKeys, kDepth>(shared.Values(), seen);
      hopper::NamedSync(kBoth, 2 * kWarpgroup);
    }
    for (int member = 0; member < p.group(); ++member) {
      int first[2] = {}, last[2] = {};  // the queries that see this thread's keys, in a masked step
      const auto find_range = [&](int block) {
        const Band band = tile.band(p);
        const Reach& reach = arguments.sums.reach;
        const int64_t line = reach.Line(tile[kBatch], tile[kKeyHead]);
        for (int h = 0; h < 2; ++h)
          band.RangeSeeing(own_key() + 8 * h, block * kQueries + column, p, reach, line, &first[h], &last[h]);
      };
      // P^T = exp2(S^T factor - lse) replaces S^T. masked: some queries do not see some keys.
      const auto probabilities = [&](auto masked) {
        const uint32_t lse = shared.Lse(steps % kStages) + column * 4;
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) {
          const float2 two = LoadShared<float2>(lse + 32 * i);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = scores[4 * i + e];
            score = Exp2(fmaf(score, factor, e % 2 ? -two.y : -two.x));
            if constexpr (decltype(masked)::value) {
              const int query = 8 * i + e % 2;
              if (query < first[e / 2] || query > last[e / 2]) score = 0;
            }
          }
        }
      };
      // dS^T = P^T (dP^T - delta) replaces dP^T.
      const auto gradients = [&] {
        const uint32_t delta = shared.Delta(steps % kStages) + column * 4;
#pragma unroll
        for (int i = 0; i < kQueries / 8; ++i) {
          const float2 two = LoadShared<float2>(delta + 32 * i);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& value = dscores[4 * i + e];
            value = scores[4 * i + e] * (value - (e % 2 ? two.y : two.x));
          }
        }
      };
      const auto add_values = [&] {
        hopper::FenceRegisters();
        MultiplyRows<T, kDepth, kQueries>(dv, rounded, shared.Cotangents(steps % kStages), kQueryChunk, accumulate);
        hopper::CommitProducts();
      };
      const auto settle = [&] {
        hopper::Settle(rounded);
        hopper::Settle(drounded);
        hopper::Settle(dk);
        hopper::Settle(dv);
      };
      // No product is in flight at the end of a step: ptxas only follows a pipeline inside one iteration (C7514,
      // C7515). The other warpgroup fills the gap. half: the queries see no key of the second warpgroup, which then
      // only takes its part of dQ.
      const auto step = [&](int block, auto masked, auto half) {
        constexpr bool kHalf = decltype(half)::value;
        const int stage = steps % kStages;
        const uint32_t parity = steps / kStages & 1;
        if (!kHalf || group == 0) {
          if constexpr (decltype(masked)::value && !Tile::kGeneral) find_range(block);
          shared.QueriesFull(stage).Wait(parity);
          if constexpr (decltype(masked)::value || Tile::kGeneral) {
            if (const int seeing = tile[kBandQueries] - block * kQueries; p.query_lengths && seeing < kQueries) {
              shared.CotangentsFull(stage).Wait(parity);
              ClearRows<kQueries, kDepth>(shared.Queries(stage), seeing);
              ClearRows<kQueries, kDepth>(shared.Cotangents(stage), seeing);
              hopper::NamedSync(kOwn + group, kWarpgroup);
            }
          }
          hopper::FenceRegisters();
          MultiplyDepths<T, kQueries, kDepth>(scores, keys, kKeyChunk, shared.Queries(stage), kQueryChunk);
          hopper::CommitProducts();
          hopper::FenceRegisters();
          shared.CotangentsFull(stage).Wait(parity);
          MultiplyDepths<T, kQueries, kDepth>(dscores, values, kKeyChunk, shared.Cotangents(stage), kQueryChunk);
          hopper::CommitProducts();
          if constexpr (Tile::kGeneral) {
            hopper::WaitProducts<0>();
            hopper::Settle(scores);
            hopper::Settle(dscores);
            const GeneralGradients<T, kQueries> general(p, arguments.sums.reach, tile.band(p), tile[kBatch],
                                                        tile[kKeyHead] * p.group() + member, own_key());
            const int at_stage = steps % Tile::kExtraStages;
            const Fetched fetched = arguments.fetched;
            if (fetched != Fetched::kNothing) shared.ExtraFull(at_stage).Wait(steps / Tile::kExtraStages & 1);
            const uint32_t chunk = fetched == Fetched::kBias ? group * kQueryChunk : 0;
            general.Finish(scores, dscores, rounded, drounded, block * kQueries + column,
                           shared.Lse(stage) + column * 4, shared.Delta(stage) + column * 4,
                           block < tile[kWholeFirst + group] || block >= tile[kWholeLast + group],
                           {fetched, shared.Extra(at_stage) + chunk});
            if (fetched != Fetched::kNothing) {
              hopper::FenceSharedForCopies();  // the reads are before the refill
              __syncwarp();
              shared.ExtraEmpty(at_stage).ArriveForWarp(lead);
            }
          } else if constexpr (Tile::kLateValues) {
            hopper::WaitProducts<1>();
            hopper::Settle(scores);
            probabilities(masked);
            hopper::WaitProducts<0>();
            hopper::Settle(dscores);
            gradients();
            Round<T>(rounded, scores);
          } else {
            hopper::WaitProducts<1>();
            hopper::Settle(scores);
            probabilities(masked);
            Round<T>(rounded, scores);
            add_values();
            hopper::WaitProducts<1>();
            hopper::Settle(dscores);
            gradients();
          }
          if constexpr (!Tile::kGeneral) Round<T>(drounded, dscores);
          if (!accumulate) await_values();
          StoreRounded(shared.Scores(steps & 1), kKeyChunk, 64 * group, drounded);
          if constexpr (Tile::kLateValues || Tile::kGeneral) add_values();
          hopper::FenceRegisters();
          MultiplyRows<T, kDepth, kQueries>(dk, drounded, shared.Queries(stage), kQueryChunk, accumulate);
          hopper::CommitProducts();
          accumulate = 1;
          if constexpr (kHalf) {
            hopper::WaitProducts<0>();
            settle();
          }
        }
        hopper::FenceSharedForCopies();            // also orders the reads of lse and delta before their refill
        hopper::NamedSync(kBoth, 2 * kWarpgroup);  // both warpgroups' dS is there
        float dq[32];
        const uint32_t ds = shared.Scores(steps & 1) + (Tile::kSplitsDepth ? 0 : group * kKeyChunk);
        hopper::FenceRegisters();
        MultiplyTransposed<T, 64, kHalf ? 64 : kKeys>(
            dq, ds, shared.Keys() + (Tile::kSplitsDepth ? group * kKeyChunk : 0), kKeyChunk);
        hopper::CommitProducts();
        hopper::WaitProducts<0>();
        hopper::Settle(dq);
        if constexpr (!kHalf) settle();
        __syncwarp();  // all lanes have read lse and delta
        shared.QueriesEmpty(stage).ArriveForWarp(lead);
        shared.CotangentsEmpty(stage).ArriveForWarp(lead);
        await_place(steps + k);
        const uint32_t part = shared.Part(group, part_buffer()) + threadIdx.x % kWarpgroup * 16;
#pragma unroll
        for (int i = 0; i < 8; ++i)
          StoreShared(part + i * kWarpgroup * 16, float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]});
        hopper::FenceSharedForCopies();
        __syncwarp();
        shared.PartFull(group, part_buffer()).ArriveForWarp(lead);
        ++steps;
      };
      [[maybe_unused]] constexpr std::true_type kYes;
      constexpr std::false_type kNo;
      int block = tile[kFirstBlock];
      if constexpr (Tile::kSplitsDepth && !Tile::kGeneral) {
        if (tile[kHalf] && block < tile[kLastBlock]) step(block++, kYes, kYes);
      }
      if constexpr (Tile::kGeneral) {
        for (const int last = tile[kLastBlock]; block < last; ++block) step(block, kNo, kNo);
      } else {
        for (int field = kWholeFirst + group;; field = kLastBlock) {
          for (const int last = tile[field]; block < last; ++block) step(block, kYes, kNo);
          for (const int last = tile[kWholeLast + group]; block < last; ++block) step(block, kNo, kNo);
          if (block >= tile[kLastBlock]) break;
        }
      }
    }
    if (!accumulate) {  // nothing sees these keys
#pragma unroll
      for (int i = 0; i < kDepth / 2; ++i) dk[i] = dv[i] = 0;
      await_values();
    }
    // Keys and values may be overwritten: the next ones are on their way while these results leave.
    if (!accumulate) hopper::FenceSharedForCopies();  // as steps do
    __syncwarp();
    shared.KeysEmpty().ArriveForWarp(lead);
    hopper::NamedSync(kBoth, 2 * kWarpgroup);  // dV takes dS's space, which nobody reads any more
#pragma unroll
    for (int i = 0; i < kDepth / 2; ++i) dk[i] *= p.scale;
    if (arguments.wide_dk) {
      StoreWide(arguments.wide_dk, dk, p, own_key(), tile[kKeyHead], tile[kBatch]);
      StoreWide(arguments.wide_dv, dv, p, own_key(), tile[kKeyHead], tile[kBatch]);
      await_place(steps + k);
    } else {
      uint32_t result[kDepth / 4];
      Round<T>(result, dv);
      StoreRounded(shared.Scores(0), Tile::kScoreBytes, 64 * group, result);
      Round<T>(result, dk);
      await_place(steps + k);
      StoreRounded(shared.Part(group, part_buffer()), kChunk<64>, 0, result);
      hopper::FenceSharedForCopies();
    }
    __syncwarp();
    shared.PartFull(group, part_buffer()).ArriveForWarp(lead);
  });
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    AttentionBackward(const __grid_constant__ BackwardArguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (!arguments.sums.reach.IsFor(Tile::kGeneral)) return;
  extern __shared__ __align__(1024) uint8_t aligned[];  // it is the block's only shared memory
  const BackwardShared<Tile> shared = {SharedAddress(aligned)};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    if (shared.base % 1024 != 0) __trap();
    hopper::Prefetch(arguments.q);
    hopper::Prefetch(arguments.dout);
    hopper::Prefetch(arguments.k);
    hopper::Prefetch(arguments.v);
    shared.Initialize();
  }
  __syncthreads();
  if (warp < 4) {
    hopper::ReleaseRegisters<Tile::kLoaderRegisters>();
    if (threadIdx.x == 0) LoadQueries(arguments, shared);
    if (warp == 1 || warp == 2) AddParts(arguments, shared, warp - 1);
    if (warp == 3) LoadKeys(arguments, shared);
  } else {
    hopper::AcquireRegisters<Tile::kConsumerRegisters>();
    AttendBackward(arguments, shared, warp / 4 - 1);
  }
#endif
}

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_BACKWARD_CUH_
