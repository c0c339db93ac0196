#include "platform/cpu/blocks.inl"

const asyncengine::BlockKernels& asyncengine::block_kernels_portable() { return kKernels; }
