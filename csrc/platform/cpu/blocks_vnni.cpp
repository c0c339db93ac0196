#include "platform/cpu/blocks.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#include "platform/cpu/blocks.inl"
const asyncengine::BlockKernels* asyncengine::block_kernels_vnni() { return &kKernels; }
#else
const asyncengine::BlockKernels* asyncengine::block_kernels_vnni() { return nullptr; }
#endif
