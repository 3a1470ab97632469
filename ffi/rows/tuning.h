// Which kernel rows get, by their length. This file holds all numbers that a new GPU or a new measurement may change:
// change a line, rebuild the row files, and see the effect in jaxops.explain. A kernel is compiled for an op if a step
// in the op's ladder can name it. A ladder is one table of steps; docs/adding.md explains the words.
#ifndef JAXOPS_ROWS_TUNING_H_
#define JAXOPS_ROWS_TUNING_H_

#include <cstdint>
#include <span>

namespace jaxops::rows {

// A step covers rows up to `length` packs, 16 bytes each (up to `length` elements, if the ladder says so). It gives
// each thread so many packs in registers, and each row so many blocks. The threads follow: as few as hold the row, a
// power of two within a warp, whole warps beyond (PlanRows). The numbers behind a line are a share of a copy's rate,
// measured on an H200 over 256 MiB per input.
struct Step {
  int64_t length;
  int packs;
  int cluster = 1;
  int lanes = 0;
};
using Ladder = std::span<const Step>;

// One input, no parameters: forward softmax and log_softmax.
inline constexpr Step kOneInput[] = {
    {64, 2},         // more threads than with 4 packs: there are usually many short rows
    {2048, 4},       // 5120 16-bit columns: 160 threads
    {6144, 8},       // 20480: 320 threads
    {8192, 8, 2},    //
    {16384, 8, 8},   // more blocks per row, because half the threads already fill a multiprocessor's registers
    {65536, 8, 16},  //
};
// Two inputs, no parameters: gradients of softmax and log_softmax. 8 packs from two inputs spill.
inline constexpr Step kTwoInputs16[] = {{1152, 2}, {1536, 4}, {8192, 4, 4}, {16384, 4, 8}, {65536, 4, 16}};
inline constexpr Step kTwoInputs32[] = {{1152, 2}, {4096, 4}, {8192, 4, 4}, {16384, 4, 8}, {65536, 4, 16}};
// One input and parameters: forward norms. With few packs per thread, the parameters would be read too often; 8 packs
// in a warp spill (512 columns: .94 of 4 packs).
inline constexpr Step kWithParameter16[] = {
    {8, 2},    {16, 4},       {24, 3},       {32, 4}, {48, 3},  // 160 columns: 8 lanes x 3
    {64, 4},   {96, 3},       {1024, 4},                        // 768: 32 x 3, none idle; 2048: 64 x 4 1.00, 32 x 8 .92
    {4096, 8}, {16384, 8, 4}, {65536, 8, 16}};
inline constexpr Step kWithTwoParameters16[] = {
    {8, 2},    {16, 4},       {24, 3},       {32, 4},
    {48, 3},   {64, 4},       {96, 3},       {512, 4},  // 8192: 256 lanes x 4 .91 of 128 x 8
    {4096, 8}, {16384, 8, 4}, {65536, 8, 16}};
inline constexpr Step kWithParameters32[] = {
    {2048, 4},
    {4096, 8},
    {16384, 8, 4},
    {65536, 8, 16},
};
// Tensors that carry their dtypes: packs have 8 elements, held as f32.
inline constexpr Step kHeldAny[] = {{1024, 2}, {4096, 2, 4}, {8192, 2, 8}, {16384, 2, 16}};
// Bodies that hold f32 copies of their packs: logits with a bias, or f32 logits with masks.
inline constexpr Step kHeldAsF32[] = {{2048, 4}, {4096, 4, 2}, {8192, 4, 4}, {16384, 4, 8}};
// 16-bit logits with masks alone are held in their dtype. A third of the work does not
// depend on the number of packs: each thread does it once per row.
inline constexpr Step kMasks16[] = {{2048, 8}};
inline constexpr Step kMasks32[] = {{2048, 4}};

// Unaligned rows. The shortest are read by single elements and longer ones by shifted packs; rows that these cannot
// hold are staged in shared memory. Rows whose parameters stay are staged from the shortest on, because shifted packs
// would read the parameters unaligned.
inline constexpr int64_t kMostElements = 64;
inline constexpr Step kSingles[] = {{4096, 8}};                   // if neither holds a row
inline constexpr Step kShortestSingles[] = {{kMostElements, 8}};  // if tensors carry their dtypes
inline constexpr Step kSinglesWithOptions[] = {{8192, 16}};
inline constexpr Step kShiftedOneInput[] = {{16, 4},   {24, 3},  {32, 4},
                                            {48, 3},   {64, 4},  {96, 3},  // 127 columns: 8 lanes x 3 1.00, x 4 .96
                                            {2048, 4}, {8192, 8}};         // 50257: a block 1.00, a cluster of 2 .94
inline constexpr Step kShiftedTwoInputs[] = {{16, 4}, {24, 3}, {32, 4},  {48, 3},
                                             {64, 4}, {96, 3}, {128, 4}, {5120, 5}};  // 20001: two blocks fit
inline constexpr Step kShiftedAny[] = {{1024, 2}};
// Columns along several axes, in packs.
inline constexpr Step kSeveralAxes[] = {{2048, 4}};

// Blocks that stay and fetch rows ahead. This ladder is for rows with parameters, which they read once.
inline constexpr Step kPersistentWithParameters16[] = {
    {2048, 4, 4}, {4096, 8, 4}, {16384, 8, 8}, {32768, 8, 16}};  // 65536 columns: 4 packs .94 of 8
inline constexpr Step kPersistentWithParameters32[] = {
    {4096, 4, 4}, {8192, 4, 8}, {16384, 8, 8}, {32768, 8, 16}, {65536, 16, 16}};
inline constexpr int64_t kLeastPersistent[] = {1536, 2048};  // 16-bit packs: layer_norm, rms_norm; f32: twice
// Without parameters only the longest rows.
inline constexpr Step kPersistent[] = {{65536, 8, 16}};
inline constexpr int64_t kLeastPersistentAlone = 16384;
// With sums over rows. Few threads with many registers are faster than many threads with few.
inline constexpr Step kSums16[] = {{64, 2},      {128, 4},     {1024, 2},      {2048, 4, 2},
                                   {4096, 4, 4}, {8192, 4, 8}, {16384, 4, 16}, {32768, 8, 16}};
inline constexpr Step kSums32[] = {{64, 2},       {256, 4},  // 768 columns: 96 lanes x 2 .80 of 64 x 4
                                   {1024, 2},     {4096, 8, 2},   {8192, 8, 4},
                                   {16384, 8, 8}, {32768, 8, 16}, {65536, 16, 16}};
// The same if tensors carry their dtypes, and for rows of single elements.
inline constexpr Step kSumsOfAny[] = {{1024, 2}, {16384, 2, 16}};
inline constexpr Step kSumsOfElements[] = {{4096, 8}, {65536, 8, 16}};

// Staged rows, by elements per thread: 33, so that 2^k + 1 columns fit. A cluster's threads follow the length, so that
// few of their elements lie behind the row's end.
inline constexpr Step kStaged[] = {{256, 16},      {4224, 33},      {8448, 33, 2},   {21120, 33, 4},
                                   {42240, 33, 8}, {67584, 33, 16}, {262144, 64, 16}};
// Without parameters: the rows that shifted packs cannot hold.
inline constexpr Step kStagedAlone[] = {{21120, 33, 4}, {42240, 33, 8}, {67584, 33, 16}, {262144, 64, 16}};
// With sums over rows, in f32.
inline constexpr Step kStagedSums32[] = {{128, 8},       {512, 16},      {4224, 33},      {8448, 33, 2},
                                         {21120, 33, 4}, {42240, 33, 8}, {67584, 33, 16}, {131072, 64, 16}};

// Rows across: neighbouring rows' elements are adjacent, so that a pack is one column in four rows. Lengths are in
// columns.
inline constexpr Step kAcrossOneInput16[] = {{128, 8, 1, 16},    {256, 8, 1, 32},    {512, 16, 1, 32},
                                             {1024, 16, 1, 64},  {2048, 16, 4, 32},  {4096, 16, 8, 32},
                                             {8192, 16, 16, 32}, {16384, 16, 16, 64}};
inline constexpr Step kAcrossOneInput32[] = {{128, 8, 1, 16},   {256, 8, 1, 32},   {512, 16, 1, 32}, {1024, 16, 2, 32},
                                             {2048, 16, 4, 32}, {4096, 16, 8, 32}, {8192, 8, 16, 64}};
inline constexpr Step kAcrossWithParameters[] = {{256, 8}, {512, 16}, {2048, 16, 4}, {16384, 16, 16}};
inline constexpr Step kAcrossTwoInputs16[] = {{256, 8}, {512, 8, 2}, {1024, 8, 4}, {2048, 8, 8}, {4096, 8, 16}};
inline constexpr Step kAcrossTwoInputs32[] = {{512, 8}, {1024, 4, 8}, {4096, 4, 16}};
inline constexpr Step kAcrossAny[] = {{512, 8}, {1024, 8, 2}, {8192, 8, 16}};
inline constexpr Step kAcrossElements[] = {{256, 8}, {2048, 8, 8}};

// The longest rows that are not split into segments. Across: in columns, [16 bits, 32 bits][forward, backward]; for
// single elements, one number. Along: in bytes, [forward, backward]; one number for two dtypes, and one for several
// axes, whose rows each have a block alone.
inline constexpr int64_t kLongestAcross[2][2] = {{16384, 4096}, {8192, 16384}}, kLongestElements = 2048;
inline constexpr int64_t kLongestBytes[2] = {1 << 20, 1 << 19}, kLongestMixed = 65536, kLongestAxes = 8192;

// The most registers per thread. Two limits for one kernel differ by up to 42 % in speed, because they decide how many
// blocks a multiprocessor holds. If the limit is below the number that a body needs, it spills. 65536 / this is the
// most threads per block.
struct Limits {
  int two, four, eight;  // packs, held once
};
inline constexpr Limits kOneInputRegisters = {40, 48, 80};
inline constexpr Limits kTwoInputRegisters[] = {{56, 80, 80}, {48, 64, 80}};  // 16 bits, f32
inline constexpr int kTwoInputClusterRegisters[] = {64, 48};  // f32 softmax, 16384 columns: 48 1.00, 56 .94
inline constexpr int kRowValueRegisters = 16;                 // in addition, for row values that the body loads
inline constexpr Limits kParameterRegisters = {56, 56, 80};
inline constexpr int kAsF32Registers = 72, kTwoAsF32Registers = 104, kMasks16Registers = 80;
inline constexpr int kAnyRegisters[] = {80, 104};                     // [one input, two inputs]
inline constexpr int kShiftedRegisters[2][2] = {{56, 64}, {96, 64}};  // [two inputs][5 packs or 8]
inline constexpr int kSeveralAxesRegisters = 128;
inline constexpr int kElementRegisters = 80, kAnywhereRegisters = 128;  // single elements: plain, general
inline constexpr int kStreamedRegisters = 80, kSegmentRegisters = 64, kElementSegmentRegisters = 96;
inline constexpr int kTileRegisters[2][2] = {{64, 64}, {64, 128}};                     // [f32][two inputs, or 16 packs]
inline constexpr int kPersistentRegisters = 128, kPersistentParameterRegisters = 255;  // for more than 4 packs
// With sums over rows, [16 bits, f32]: rows get as many chunks as these limits let an H200 hold at once.
inline constexpr int kSumRegisters[] = {128, 96}, kSumWideRegisters[] = {255, 168};  // 2 packs, 4
inline constexpr int kSumClusterRegisters = 255, kSumElementRegisters = 128;
inline constexpr int kStagedRegisters[4][3] = {// [one input, two, parameters, sums][16, 33, 64 elements]
                                               {96, 112, 168},
                                               {128, 168, 255},
                                               {128, 168, 255},  // 136, for a third block of 160 threads: .75
                                               {144, 255, 255}};

inline constexpr int kFewPacks[] = {1, 2};  // packs per thread in kernels for few rows: [one input, two inputs]
// "Few rows" take at most so many threads, half as many as an H200 runs at once; then each thread has one pack. The
// numbers are smaller in emulation, so that tests reach every plan.
#ifdef JAXOPS_EMULATED
inline constexpr int64_t kFewThreads = 3 * 1024, kManyBlocks = 1;
#else
inline constexpr int64_t kFewThreads = 132 * 1024, kManyBlocks = 132;
#endif

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_TUNING_H_
