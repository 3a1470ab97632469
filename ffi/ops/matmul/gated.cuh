// A gated MLP's products on Hopper's tensor cores, for 16-bit operands; the gating is computed in the epilogue.
//
// There are two passes (wgmma_pass.cuh).
//
// Forward: activation(x w_gate) * (x w_up). A tile of rhs is 64 columns of w_gate beside the same 64 columns of w_up,
// so that a thread has both products for an element. It activates, multiplies and rounds them. If derivatives are
// wanted, it stores both products, too.
//
// Backward: dh = dy w_down^T. The epilogue turns its sums into dgate = dh up activation'(gate) and dup = dh
// activation(gate). A warp has the copy engine load its share of gate and up into buffers, computes in place, and has
// the results stored.
#ifndef JAXOPS_OPS_MATMUL_GATED_CUH_
#define JAXOPS_OPS_MATMUL_GATED_CUH_

#include <cstdint>

#include "ops/matmul/wgmma_pass.cuh"

namespace jaxops::matmul {

// x w_gate and x w_up: lhs is x, rhs w_gate.
template <class T_>
struct GatedForward {
  using T = T_;
  using P = Product<T, T, Major::kDepth, Major::kSpace>;
  using SumTile = WgmmaTile<128, 128, 2, 5, Schedule::kPingPong, 4>;  // both products
  struct Tile : SumTile {
    static constexpr int kColumns = SumTile::kColumns / 2;
    static_assert(kColumns * sizeof(T) == hopper::kBoxRowBytes);  // the width of a box and a buffer
  };
  using Sums = float[Tile::kBlocks][SumTile::kColumns / 2];

  struct Arguments : WgmmaArguments {
    Activation activation;
    bool keeps_products;
    CUtensorMap w_up, gate, up;
  };

  static __device__ void Prefetch(const Arguments& arguments) { hopper::Prefetch(arguments.w_up); }

  // Loads the tiles of rhs.
  static __device__ void LoadRhs(const Arguments& arguments, const TileLoads& loads, const Ring<Tile>& ring, int stage,
                                 int column, int k_tile) {
    const Barrier full = ring.Full(stage);
    LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(stage), loads.rhs, full, column, k_tile, 0);
    LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(stage) + kBlockBytes, arguments.w_up, full, column, k_tile,
                                                 0);
  }

  class Epilogue : public StagedBoxes<Tile> {
   public:
    __device__ Epilogue(const Arguments& arguments, const PassMemory& memory, int)
        : Boxes(memory.staging), arguments_(arguments) {
      if (threadIdx.x % kWarpgroup == 0) {
        hopper::Prefetch(arguments.out);
        if (arguments.keeps_products) {
          hopper::Prefetch(arguments.gate);
          hopper::Prefetch(arguments.up);
        }
      }
    }

    // Called before a work's products begin.
    __device__ void Begin(const WgmmaWork&, Sums&) const {}

    __device__ void Store(const Sums& sums, const WgmmaWork& work) {
      constexpr int kCount = Tile::kColumns / 2;
#pragma unroll 1
      for (int block = 0; block < Tile::kBlocks; ++block) {
        float gate[kCount], up[kCount];
        SelectGroup<0, 2 * Tile::kBlocks>(sums, 2 * block, gate);
        SelectGroup<0, 2 * Tile::kBlocks>(sums, 2 * block + 1, up);
        const auto store = [&](const CUtensorMap& map, const float (&values)[kCount]) {
          const uint32_t buffer = this->Acquire();
          Boxes::template Stage<T>(buffer, 0, values);
          Boxes::HandOutBox(map, buffer, work.row + block * 64, work.column, 0);
        };
        if (arguments_.keeps_products) {
          store(arguments_.gate, gate);
          store(arguments_.up, up);
        }
        Activate<kAccuracyFor<T>>(arguments_.activation, gate);
#pragma unroll
        for (int i = 0; i < kCount; ++i) gate[i] *= up[i];
        store(arguments_.out, gate);
      }
    }

   private:
    using Boxes = StagedBoxes<Tile>;
    const Arguments& arguments_;
  };
};

// dy w_down^T: lhs is dy, rhs w_down, which lies along k.
template <class T_>
struct GatedBackward {
  using T = T_;
  using P = Product<T, T, Major::kDepth, Major::kDepth>;
  using SumTile = WgmmaTile<128, 192, 2, 4, Schedule::kPingPong, 4>;
  using Tile = SumTile;
  using Sums = float[Tile::kBlocks][Tile::kColumns / 2];

  struct Arguments : WgmmaArguments {
    Activation activation;
    CUtensorMap gate, up, dgate, dup;
  };

  static __device__ void Prefetch(const Arguments& arguments) {
    if (arguments.rhs_edge.bytes) hopper::Prefetch(arguments.rhs_at_edge);
  }

  static __device__ void LoadRhs(const Arguments&, const TileLoads& loads, const Ring<Tile>& ring, int stage,
                                 int column, int k_tile) {
    LoadTile<P::kRhs, Tile::kColumns, P::kDepth>(ring.Rhs(stage), loads.rhs, ring.Full(stage), column, k_tile, 0);
  }

  // A tile's chunks are 64 rows by 64 columns. A pair of buffers holds gate's and up's chunks, which become dgate and
  // dup; meanwhile the next chunks are loaded into the other pair. Each warp has 16 rows, and a barrier for each pair.
  class Epilogue : public StagedBoxes<Tile> {
   public:
    __device__ Epilogue(const Arguments& arguments, const PassMemory& memory, int warpgroup)
        : Boxes(memory.staging), arguments_(arguments), barriers_(memory.barriers + warpgroup * 4 * kPassBarriers * 8) {
      if (hopper::ElectLane()) {
        for (int pair = 0; pair < kPairs; ++pair) Loaded(pair).Initialize(1);
        hopper::FenceBarriers();
      }
      __syncwarp();
    }

    // Loads the first chunk while the products are computed.
    __device__ void Begin(const WgmmaWork& work, Sums&) const { Load(work, 0); }

    __device__ void Store(const Sums& sums, const WgmmaWork& work) {
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (chunk + 1 < kChunks) Load(work, chunk + 1);
        const uint32_t gates = Gates(chunk), ups = gates + kBlockBytes;
        Loaded(chunk % kPairs).Wait(parity_ >> chunk % kPairs & 1);
        parity_ ^= 1 << chunk % kPairs;
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          float dh[8], gate[8], up[8];
          SelectGroup<0, kChunks * kGroups>(sums, chunk * kGroups + group, dh);
          Fetch(gates, group, gate);
          Fetch(ups, group, up);
#pragma unroll
          for (int i = 0; i < 8; ++i) up[i] *= dh[i];
          Differentiate<kAccuracyFor<T>>(arguments_.activation, gate, up);
          Activate<kAccuracyFor<T>>(arguments_.activation, gate);
#pragma unroll
          for (int i = 0; i < 8; ++i) dh[i] *= gate[i];
          Boxes::template Stage<T>(gates, group, up);
          Boxes::template Stage<T>(ups, group, dh);
        }
        Boxes::HandOutBox(arguments_.dgate, gates, Row(work, chunk), Column(work, chunk), 0);
        Boxes::HandOutBox(arguments_.dup, ups, Row(work, chunk), Column(work, chunk), 0);
      }
    }

   private:
    using Boxes = StagedBoxes<Tile>;
    static constexpr int kWidth = hopper::kBoxRowBytes / sizeof(T), kGroups = kWidth / 16;
    static constexpr int kChunks = Tile::kBlocks * Tile::kColumns / kWidth, kPairs = 2;
    static_assert(kChunks % kPairs == 0 && kPairs * 2 == Tile::kStagingBuffers && kPairs == kPassBarriers);

    static __device__ int Row(const WgmmaWork& work, int chunk) {
      return work.row + chunk / (kChunks / Tile::kBlocks) * 64;
    }
    static __device__ int Column(const WgmmaWork& work, int chunk) {
      return work.column + chunk % (kChunks / Tile::kBlocks) * kWidth;
    }
    __device__ uint32_t Gates(int chunk) const { return this->staging_ + chunk % kPairs * 2 * kBlockBytes; }
    __device__ Barrier Loaded(int pair) const { return {barriers_ + (Boxes::warp() * kPassBarriers + pair) * 8}; }

    // Loads the warp's share of a chunk from gate and up, once the buffers' earlier contents have been stored.
    __device__ void Load(const WgmmaWork& work, int chunk) const {
      constexpr int kPartBytes = 16 * hopper::kBoxRowBytes;
      const int line = Boxes::warp() * 16;
      if (hopper::ElectLane()) {
        hopper::WaitStoresRead<0>();
        const Barrier loaded = Loaded(chunk % kPairs);
        const uint32_t target = Gates(chunk) + line * hopper::kBoxRowBytes;
        const int row = Row(work, chunk) + line, column = Column(work, chunk);
        loaded.ArriveAndExpect(2 * kPartBytes);
        hopper::LoadBox(target, arguments_.gate, loaded, column, row, 0);
        hopper::LoadBox(target + kBlockBytes, arguments_.up, loaded, column, row, 0);
      }
      __syncwarp();
    }

    // Reads back values as Stage would have put them there.
    static __device__ void Fetch(uint32_t buffer, int group, float (&values)[8]) {
      const int lane = Boxes::lane(), line = Boxes::warp() * 16;
      Pack<T, 8> pack;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
                   : "r"(Boxes::Place(buffer, line + lane % 16, group * 2 + lane / 16))
                   : "memory");
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = pack.template Widen<float>(i);
    }

    const Arguments& arguments_;
    const uint32_t barriers_;
    uint32_t parity_ = 0;  // a bit for each pair
  };
};

}  // namespace jaxops::matmul

#endif  // JAXOPS_OPS_MATMUL_GATED_CUH_
