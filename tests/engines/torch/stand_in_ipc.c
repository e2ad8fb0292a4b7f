// The part of CUDA's driver that cuda_driver.py calls, on host memory: structures and signatures are those of cuda.h.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"

static const size_t SIZE = 1 << 16;
static const CUcontext CONTEXT = (CUcontext)0x123456789abcull;
static char *own, *mapped;  // one allocation of this process, one of another's
static int descriptor, depth;

extern "C" void *stand_in_allocation(void) {
    descriptor = memfd_create("stand-in", 0);
    if (ftruncate(descriptor, SIZE)) return 0;
    own = (char *)mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    return own;
}

extern "C" int stand_in_depth(void) { return depth; }

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal + 40;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = CONTEXT;
    return device == 40 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    depth++;
    return context == CONTEXT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *context) {
    depth--;
    *context = CONTEXT;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr *begin, size_t *size, CUdeviceptr address) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    if (address < (CUdeviceptr)own || address >= (CUdeviceptr)own + SIZE) return CUDA_ERROR_NOT_FOUND;
    *begin = (CUdeviceptr)own;
    *size = SIZE;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    if (!depth || address != (CUdeviceptr)own) return CUDA_ERROR_INVALID_VALUE;
    memset(handle->reserved, 0, sizeof(handle->reserved));
    snprintf(handle->reserved, sizeof(handle->reserved), "/proc/%d/fd/%d", getpid(), descriptor);
    handle->reserved[63] = 7;  // all 64 bytes count
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    int opened = open(handle.reserved, O_RDWR);
    if (!depth || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || handle.reserved[63] != 7) return CUDA_ERROR_INVALID_VALUE;
    if (opened < 0) return CUDA_ERROR_MAP_FAILED;
    mapped = (char *)mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    close(opened);
    *address = (CUdeviceptr)mapped;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr address) {
    return depth && address == (CUdeviceptr)mapped && !munmap(mapped, SIZE) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_MAP_FAILED ? "CUDA_ERROR_MAP_FAILED" : "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}
