// CUDA's driver, as torch and Triton ask it: the device, modules that are loaded into nothing, and memory that is mapped in pieces, of which
// expandable segments are made.
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// The runtime counts the device's memory (runtime.c); Triton opens this library alone.
__attribute__((weak)) int null_cuda_take(size_t nbytes);
__attribute__((weak)) void null_cuda_give(size_t nbytes);
__attribute__((weak)) void null_cuda_note(void* at, size_t nbytes, int pinned);
__attribute__((weak)) size_t null_cuda_forget(void* at);

CUresult cuInit(unsigned flags) {
  const char* given = getenv("NULL_CUDA_DEVICES");
  return given && *given == '0' ? CUDA_ERROR_NO_DEVICE : 0;
}
CUresult cuDeviceGetCount(int* out) { *out = 1; return 0; }
CUresult cuDriverGetVersion(int* out) { *out = CUDA_VERSION; return 0; }
CUresult cuDeviceGet(CUdevice* out, int ordinal) { *out = 0; return 0; }
CUresult cuGetErrorString(CUresult error, const char** out) { *out = "an error of the null device"; return 0; }
CUresult cuGetErrorName(CUresult error, const char** out) { *out = "an error of the null device"; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) { *flags = 0, *active = 1; return 0; }
CUresult cuCtxGetCurrent(CUcontext* out) { *out = (CUcontext)0x10; return 0; }
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice device) {
  static const int known[][2] = {
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024}, {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32}, {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536}, {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132}, {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120}, {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048}, {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0}, {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448}, {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 0}, {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 0},
  };
  *out = 1;
  for (size_t at = 0; at < sizeof known / sizeof *known; ++at)
    if (known[at][0] == (int)attribute) *out = known[at][1];
  return 0;
}
CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction function) {
  *out = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuModuleLoadData(CUmodule* out, const void* image) { *out = (CUmodule)0x20; return 0; }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) { *out = (CUfunction)0x30; return 0; }

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp* of, CUmemAllocationGranularity_flags flags) {
  *out = 2 << 20;
  return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr* out, size_t nbytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
  void* const at = mmap((void*)wanted, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = (CUdeviceptr)at;
  return 0;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t nbytes) { munmap((void*)at, nbytes); return 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t nbytes, const CUmemAllocationProp* of, unsigned long long flags) {
  if (!null_cuda_take || !null_cuda_take(nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = nbytes;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { null_cuda_give(handle); return 0; }
CUresult cuMemMap(CUdeviceptr at, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  null_cuda_note((void*)at, nbytes, 0);
  return 0;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t nbytes) {
  for (size_t gone = 0, each; gone < nbytes && (each = null_cuda_forget((void*)(at + gone))); gone += each) {}
  return 0;
}
