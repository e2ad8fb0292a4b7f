// The part of CUDA's driver that weight_memory.py calls, on host memory: structures and signatures are those of cuda.h.
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"

static const size_t GRANULARITY = 1 << 16;

static int is_right(const CUmemAllocationProp *prop) {
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           prop->location.id == 0 && prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
           !prop->allocFlags.compressionType && !prop->win32HandleMetaData;
}

CUresult CUDAAPI cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                               CUmemAllocationGranularity_flags option) {
    *granularity = GRANULARITY;
    return is_right(prop) && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                             unsigned long long flags) {
    int fd = memfd_create("stand-in", 0);
    if (!is_right(prop) || flags || size % GRANULARITY || ftruncate(fd, size)) return CUDA_ERROR_INVALID_VALUE;
    *handle = fd;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    return close((int)handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType type, unsigned long long flags) {
    *(int *)shareable = dup((int)handle);
    return type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                                CUmemAllocationHandleType type) {
    int fd = dup((int)(intptr_t)os_handle);
    *handle = fd;
    return fd < 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                                     unsigned long long flags) {
    void *found = mmap(0, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = (CUdeviceptr)found;
    return found == MAP_FAILED || alignment != GRANULARITY || wish || flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    return munmap((void *)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    if (flags || lseek((int)handle, 0, SEEK_END) < (off_t)size) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, offset);
    return found == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id)
        return CUDA_ERROR_INVALID_VALUE;
    int writes = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!writes && desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ) return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)address, size, PROT_READ | (writes ? PROT_WRITE : 0)) ? CUDA_ERROR_INVALID_VALUE
                                                                                  : CUDA_SUCCESS;
}
