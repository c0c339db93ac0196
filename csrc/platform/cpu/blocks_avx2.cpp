#include "platform/cpu/blocks.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "platform/cpu/blocks.inl"
const asyncengine::BlockKernels* asyncengine::block_kernels_avx2() { return &kKernels; }
#else
const asyncengine::BlockKernels* asyncengine::block_kernels_avx2() { return nullptr; }
#endif
