#include "emulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

// The block's dynamic shared memory, as the kernels declare it.
namespace jaxops::rows {
alignas(128) thread_local char shared[232448 + 4096];
}

thread_local uint3 threadIdx, blockIdx;
thread_local dim3 gridDim, blockDim;

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kStackEdge = 64, kSharedEdge = 4096;  // bytes behind a stack or shared memory that stay untouched
constexpr char kPoison = -1;                           // bytes of NaN

bool Poisoned(const char* begin, const char* end) {
  return std::all_of(begin, end, [](char byte) { return byte == kPoison; });
}

// A kernel's mistake ends the process, because no caller could be told.
void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}

struct Copy {
  char* target;
  const void* source;
  int bytes, inside;
};

struct Fiber {
  ucontext_t context;
  uint3 thread;
  bool done = false;
  int turn = 0;           // its next exchange's
  int cluster_waits = 0;  // how often it has waited for the cluster
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;
};

// A point at which `size` fibers meet.
struct Meeting {
  int size = 0, arrived = 0, phase = 0;
};

struct Warp {
  uint64_t values[2][32];
  Meeting meeting;
};

struct Cluster {
  std::mutex mutex;
  std::vector<char*> shared;  // its blocks'; null once they have ended
  std::atomic<int> arrived = 0;
  int threads = 0;
};

struct Block {
  uint32_t rank = 0;
  Cluster* cluster = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting all;
  int current = 0, left = 0;
  ucontext_t caller;
  const std::function<void()>* body = nullptr;

  Fiber& fiber() { return fibers[current]; }

  // Goes on to the next fiber that has not ended, or back to the caller.
  void Yield() {
    Fiber& from = fiber();
    if (left == 0) {
      swapcontext(&from.context, &caller);
      return;
    }
    const int before = current;
    do current = current + 1 == static_cast<int>(fibers.size()) ? 0 : current + 1;
    while (fibers[current].done);
    if (current == before) {
      std::this_thread::yield();
      return;
    }
    threadIdx = fiber().thread;
    swapcontext(&from.context, &fiber().context);
  }

  void Meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.size) {
      meeting.arrived = 0;
      ++meeting.phase;
      return;
    }
    for (const int phase = meeting.phase; meeting.phase == phase;) Yield();
  }
};

thread_local Block* block = nullptr;

// The stacks for a block's fibers, kept for the thread's next block.
class Stacks {
 public:
  ~Stacks() { Free(); }
  char* Get(size_t count) {
    if (count > count_) {
      Free();
      void* const memory = mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      Require(memory != MAP_FAILED, "no memory for stacks");
      memory_ = static_cast<char*>(memory);
      count_ = count;
    }
    return memory_;
  }

 private:
  void Free() {
    if (count_) munmap(memory_, count_ * kStackBytes);
  }
  char* memory_ = nullptr;
  size_t count_ = 0;
};
thread_local Stacks stacks_of_thread;

void RunFiber() {
  (*block->body)();
  block->fiber().done = true;
  --block->left;
  block->Yield();
}

void RunBlock(const cudaLaunchConfig_t& config, unsigned index, uint32_t rank, Cluster* cluster,
              const std::function<void()>& body) {
  const int threads = static_cast<int>(config.blockDim.x);
  Block mine;
  blockIdx = {index, 0, 0};
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  mine.rank = rank;
  mine.cluster = cluster;
  mine.fibers = std::vector<Fiber>(threads);
  mine.warps = std::vector<Warp>((threads + 31) / 32);
  mine.all.size = mine.left = threads;
  mine.body = &body;
  const size_t dynamic = config.dynamicSmemBytes;
  Require(dynamic + kSharedEdge <= sizeof(jaxops::rows::shared), "more shared memory than there is");
  char* const behind_shared = jaxops::rows::shared + dynamic;
  std::memset(jaxops::rows::shared, kPoison, dynamic + kSharedEdge);
  char* const stacks = stacks_of_thread.Get(threads);
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = mine.fibers[t];
    fiber.thread = {static_cast<unsigned>(t), 0, 0};
    ++mine.warps[t / 32].meeting.size;
    std::memset(stacks + t * kStackBytes, kPoison, kStackEdge);
    getcontext(&fiber.context);
    fiber.context.uc_stack = {.ss_sp = stacks + t * kStackBytes, .ss_flags = 0, .ss_size = kStackBytes};
    makecontext(&fiber.context, RunFiber, 0);
  }
  block = &mine;
  threadIdx = mine.fibers[0].thread;
  swapcontext(&mine.caller, &mine.fibers[0].context);
  block = nullptr;
  Require(Poisoned(behind_shared, behind_shared + kSharedEdge), "writes behind its dynamic shared memory");
  for (int t = 0; t < threads; ++t) {
    const char* const edge = stacks + t * kStackBytes;
    Require(Poisoned(edge, edge + kStackEdge), "a stack overflowed");
  }
}

// A barrier that counts bytes, in the 64 bits that the kernel has for it.
struct ByteBarrier {
  int32_t bytes;  // bytes to come, less bytes that came before they were expected
  int16_t expected, phase;
};
static_assert(sizeof(ByteBarrier) == 8);

void AddBytes(uint64_t* barrier, int bytes, bool expect) {
  auto* const counter = reinterpret_cast<ByteBarrier*>(barrier);
  counter->bytes += bytes;
  counter->expected |= expect;
  if (counter->expected && counter->bytes == 0) *counter = {0, 0, static_cast<int16_t>(counter->phase ^ 1)};
}

}  // namespace

void SyncBlock() { block->Meet(block->all); }

uint64_t Exchange(uint64_t value, int source) {
  Fiber& fiber = block->fiber();
  Warp& warp = block->warps[fiber.thread.x / 32];
  uint64_t* const values = warp.values[fiber.turn ^= 1];
  values[fiber.thread.x % 32] = value;
  block->Meet(warp.meeting);
  return values[source & 31];
}

void BeginCopy(uint32_t target, const void* source, int bytes, int inside) {
  const bool aligned = target % bytes == 0 && reinterpret_cast<uintptr_t>(source) % bytes == 0;
  Require(aligned && inside >= 0 && inside <= bytes, "a copy that is not aligned, or of too many bytes");
  std::memset(Shared() + target, kPoison, bytes);
  block->fiber().copies.push_back({Shared() + target, source, bytes, inside});
}
void CommitCopies() {
  Fiber& fiber = block->fiber();
  fiber.groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}
void WaitCopies(int pending) {
  auto& groups = block->fiber().groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      std::memset(copy.target, 0, copy.bytes);
      std::memcpy(copy.target, copy.source, copy.inside);
    }
  }
}

char* Shared() { return jaxops::rows::shared; }

uint32_t ClusterRank() { return block->rank; }
void ClusterArrive() { ++block->cluster->arrived; }
void ClusterWait() {
  const int wanted = ++block->fiber().cluster_waits * block->cluster->threads;
  while (block->cluster->arrived < wanted) block->Yield();
}

void InitByteBarrier(uint64_t* barrier) { *barrier = 0; }
void ExpectBytes(uint64_t* barrier, int bytes) {
  const std::lock_guard lock(block->cluster->mutex);
  AddBytes(barrier, bytes, true);
}
void WaitForBytes(uint64_t* barrier, uint32_t parity) {
  const auto done = [&] {
    const std::lock_guard lock(block->cluster->mutex);
    return reinterpret_cast<ByteBarrier*>(barrier)->phase != static_cast<int16_t>(parity);
  };
  while (!done()) block->Yield();
}
void SendToBlock(const void* value, int bytes, void* target, uint64_t* barrier, uint32_t rank) {
  Cluster& cluster = *block->cluster;
  const std::lock_guard lock(cluster.mutex);
  Require(cluster.shared[rank], "sends to a block that has ended");
  const auto there = [&](void* here) { return cluster.shared[rank] + (static_cast<char*>(here) - Shared()); };
  std::memcpy(there(target), value, bytes);
  AddBytes(reinterpret_cast<uint64_t*>(there(barrier)), -bytes, false);
}

void RunGrid(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  const unsigned size = config.numAttrs ? config.attrs[0].val.clusterDim.x : 1;
  for (unsigned first = 0; first < config.gridDim.x; first += size) {
    Cluster cluster;
    cluster.shared.resize(size);
    cluster.threads = static_cast<int>(size * config.blockDim.x);
    if (size == 1) {
      RunBlock(config, first, 0, &cluster, thread);
      continue;
    }
    std::atomic<unsigned> ready = 0;
    std::vector<std::thread> blocks;
    for (unsigned rank = 0; rank < size; ++rank) {
      blocks.emplace_back([&, rank] {
        cluster.shared[rank] = Shared();
        for (++ready; ready < size;) std::this_thread::yield();
        RunBlock(config, first + rank, rank, &cluster, thread);
        const std::lock_guard lock(cluster.mutex);
        cluster.shared[rank] = nullptr;
      });
    }
    for (std::thread& one : blocks) one.join();
  }
}

}  // namespace emulator

// The runtime's functions.
extern "C" {
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 2 : 232448;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "an error"; }
}
