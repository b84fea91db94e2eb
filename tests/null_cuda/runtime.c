// CUDA's runtime on a device that computes nothing: memory is address space, kernels are launched into nothing, small copies are made.
//
// Everything that decides what a program may do is answered as a driver answers it: how much memory there is, which calls a stream that is
// being captured forbids, and that such a call ends the capture. What is not here does nothing and returns 0 (see build.py).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define COPIED (64 * 1024)  // bytes: what programs read back, and seeds; more would take pages and time for nothing

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static __thread cudaError_t last_error = 0;

static cudaError_t answer(cudaError_t error) {
  if (error) last_error = error;
  return error;
}
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = 0; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }

// Streams and captures. A stream that waits for an event of a capture joins it; all that joined must be waited for before the capture ends.
struct capture { unsigned long long id; int mode, broken, nodes; struct stream* origin; };
struct stream { struct capture* in; int priority; unsigned flags; struct stream* next; int behind; };  // behind: work that nobody waits for yet
struct event { struct capture* in; struct stream* of; int at; };
static struct stream* streams = NULL;
static struct stream legacy;  // the default stream, 0
static __thread int thread_mode = cudaStreamCaptureModeGlobal;
static __thread struct capture* thread_capture = NULL;  // begun by this thread
static int captures_under_way = 0;                      // those in the mode that forbids calls of all threads
static unsigned long long next_id = 1;

static struct stream* of(cudaStream_t handle) { return (uintptr_t)handle <= 2 ? &legacy : (struct stream*)handle; }

static cudaError_t broken(struct capture* in, cudaError_t error) {
  if (in) in->broken = 1;
  return answer(error);
}

// Of calls such as cudaMalloc, which may wait for the device: an error where a capture forbids them.
static cudaError_t unsafe(void) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return 0;
  const int mine = thread_capture && thread_capture->mode != cudaStreamCaptureModeRelaxed;
  const int others = thread_mode == cudaStreamCaptureModeGlobal && captures_under_way > 0;
  if (!mine && !others) return 0;
  for (struct stream* each = streams; each; each = each->next)
    if (each->in && (each->in == thread_capture || (others && each->in->mode == cudaStreamCaptureModeGlobal))) each->in->broken = 1;
  return answer(cudaErrorStreamCaptureUnsupported);
}

static cudaError_t work(cudaStream_t handle) {  // given to a stream
  struct stream* stream = of(handle);
  if (!stream->in) return 0;
  if (stream->in->broken) return answer(cudaErrorStreamCaptureInvalidated);
  stream->in->nodes++, stream->behind = 1;
  return 0;
}

static cudaError_t made(cudaStream_t* out, unsigned flags, int priority) {
  struct stream* stream = calloc(1, sizeof *stream);
  stream->flags = flags, stream->priority = priority;
  pthread_mutex_lock(&guard);
  stream->next = streams, streams = stream;
  pthread_mutex_unlock(&guard);
  *out = (cudaStream_t)stream;
  return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return made(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return made(out, flags, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) { return made(out, flags, priority); }
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* out) { *out = of(handle)->priority; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return 0; }

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  struct stream* stream = of(handle);
  if (stream == &legacy) return answer(cudaErrorStreamCaptureUnsupported);
  if (stream->in) return answer(cudaErrorIllegalState);
  struct capture* capture = calloc(1, sizeof *capture);
  capture->id = next_id++, capture->mode = mode, capture->origin = stream;
  stream->in = thread_capture = capture, stream->behind = 0;
  captures_under_way += mode == cudaStreamCaptureModeGlobal;
  return 0;
}
cudaError_t cudaStreamBeginCaptureToGraph(
    cudaStream_t handle, cudaGraph_t graph, const cudaGraphNode_t* nodes, const cudaGraphEdgeData* edges, size_t count,
    enum cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(handle, mode);
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  struct stream* stream = of(handle);
  struct capture* capture = stream->in;
  *graph = NULL;
  if (!capture) return answer(cudaErrorIllegalState);
  if (capture->origin != stream) return broken(capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && thread_capture != capture) return broken(capture, cudaErrorStreamCaptureWrongThread);
  int unjoined = 0;
  for (struct stream* each = streams; each; each = each->next)
    if (each->in == capture) unjoined |= each != stream && each->behind, each->in = NULL;
  captures_under_way -= capture->mode == cudaStreamCaptureModeGlobal;
  thread_capture = NULL;
  if (capture->broken) return answer(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return answer(cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t)capture;  // never freed: events may still name it
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus* out) {
  struct capture* in = of(handle)->in;
  *out = !in ? cudaStreamCaptureStatusNone : in->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return 0;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, enum cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
    const cudaGraphEdgeData** edges, size_t* count) {
  struct capture* in = of(handle)->in;
  if (id) *id = in ? in->id : 0;
  if (graph) *graph = (cudaGraph_t)in;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(handle, out);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  const int before = thread_mode;
  thread_mode = *mode, *mode = before;
  return 0;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (!nodes) *count = ((struct capture*)graph)->nodes;
  return 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  *exec = (cudaGraphExec_t)graph;
  return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) { return work(stream); }

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  struct capture* in = of(handle)->in;
  return in ? broken(in, cudaErrorStreamCaptureUnsupported) : unsafe();
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  struct capture* in = of(handle)->in;
  return in ? broken(in, cudaErrorStreamCaptureUnsupported) : 0;
}
cudaError_t cudaDeviceSynchronize(void) { return unsafe(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) { *out = calloc(1, sizeof(struct event)); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) { free(handle); return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  struct event* event = (struct event*)handle;
  struct capture* in = of(stream)->in;
  if (in && in->broken) return answer(cudaErrorStreamCaptureInvalidated);
  event->in = in, event->of = of(stream);
  return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
static cudaError_t looked_at(cudaEvent_t handle) {
  struct event* event = (struct event*)handle;
  return event->in && event->of->in == event->in ? broken(event->in, cudaErrorCapturedEvent) : 0;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return looked_at(event); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return looked_at(event); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.01f; return 0; }
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t waited, unsigned flags) {
  struct event* event = (struct event*)waited;
  struct stream* stream = of(handle);
  struct capture* theirs = event->in && event->of->in == event->in ? event->in : NULL;
  if (stream->in && stream->in->broken) return answer(cudaErrorStreamCaptureInvalidated);
  if (stream->in && !theirs && event->of && !(flags & cudaEventWaitExternal)) return broken(stream->in, cudaErrorStreamCaptureIsolation);
  if (!theirs) return 0;
  if (stream->in && stream->in != theirs) return broken(theirs, cudaErrorStreamCaptureMerge);
  if (stream == &legacy) return broken(theirs, cudaErrorStreamCaptureImplicit);
  stream->in = theirs, stream->behind = 1;
  if (event->of != stream) event->of->behind = 0;
  return 0;
}

// Memory. Of the device it is counted, and given as address space of which nothing is resident until a small copy is made.
struct segment { char* at; size_t nbytes; int pinned; struct segment* next; };
static struct segment* segments = NULL;
static size_t used = 0;
static size_t total(void) {
  const char* given = getenv("NULL_CUDA_BYTES");
  return given ? strtoull(given, NULL, 10) : (size_t)80 << 30;
}
int null_cuda_take(size_t nbytes) {  // whether the device has so much; also for the driver
  pthread_mutex_lock(&guard);
  const int fits = used + nbytes <= total();
  if (fits) used += nbytes;
  pthread_mutex_unlock(&guard);
  return fits;
}
void null_cuda_give(size_t nbytes) { pthread_mutex_lock(&guard); used -= nbytes; pthread_mutex_unlock(&guard); }
void null_cuda_note(void* at, size_t nbytes, int pinned) {
  struct segment* one = malloc(sizeof *one);
  pthread_mutex_lock(&guard);
  *one = (struct segment){at, nbytes, pinned, segments}, segments = one;
  pthread_mutex_unlock(&guard);
}
static struct segment* found(const void* p) {
  for (struct segment* each = segments; each; each = each->next)
    if ((char*)p >= each->at && (char*)p < each->at + each->nbytes) return each;
  return NULL;
}
size_t null_cuda_forget(void* at) {
  size_t nbytes = 0;
  pthread_mutex_lock(&guard);
  for (struct segment** each = &segments; *each; each = &(*each)->next)
    if ((*each)->at == at) {
      struct segment* gone = *each;
      nbytes = gone->nbytes, *each = gone->next;
      free(gone);
      break;
    }
  pthread_mutex_unlock(&guard);
  return nbytes;
}
static void* space(size_t nbytes) {
  void* const at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}
static cudaError_t absent(void);
cudaError_t cudaMalloc(void** out, size_t nbytes) {
  cudaError_t forbidden = absent() ? absent() : unsafe();
  *out = NULL;
  if (forbidden) return forbidden;
  nbytes = (nbytes + 2 * MIB - 1) & ~(2 * MIB - 1);
  if (!null_cuda_take(nbytes)) return answer(cudaErrorMemoryAllocation);
  static char* next = NULL;  // each above those before, as on a device that has given nothing back
  pthread_mutex_lock(&guard);
  if (!next) next = (char*)(((uintptr_t)space((size_t)1 << 44) + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
  char* const at = next;
  next += nbytes;
  pthread_mutex_unlock(&guard);
  null_cuda_note(at, nbytes, 0);
  *out = at;
  return 0;
}
cudaError_t cudaFree(void* at) {
  cudaError_t forbidden = unsafe();
  if (forbidden || !at) return forbidden;
  const size_t nbytes = null_cuda_forget(at);
  if (!nbytes) return answer(cudaErrorInvalidValue);
  madvise(at, nbytes, MADV_DONTNEED);
  null_cuda_give(nbytes);
  return 0;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* all) { *all = total(), *free_bytes = *all - used; return 0; }
cudaError_t cudaHostAlloc(void** out, size_t nbytes, unsigned flags) {
  cudaError_t forbidden = unsafe();
  if (forbidden) return forbidden;
  nbytes = nbytes ? nbytes : 1;
  *out = space(nbytes);
  null_cuda_note(*out, nbytes, 1);
  return 0;
}
cudaError_t cudaFreeHost(void* at) {
  cudaError_t forbidden = unsafe();
  if (!forbidden) munmap(at, null_cuda_forget(at));
  return forbidden;
}
cudaError_t cudaHostGetDevicePointer(void** out, void* host, unsigned flags) { *out = host; return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* out, const void* p) {
  memset(out, 0, sizeof *out);
  pthread_mutex_lock(&guard);
  struct segment* const in = found(p);
  out->type = !in ? cudaMemoryTypeUnregistered : in->pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  if (in) out->devicePointer = (void*)p;
  if (in && in->pinned) out->hostPointer = (void*)p;
  pthread_mutex_unlock(&guard);
  return 0;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  cudaError_t forbidden = work(stream);
  if (!forbidden && nbytes <= COPIED) memmove(to, from, nbytes);
  return forbidden;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, enum cudaMemcpyKind kind) {
  cudaError_t forbidden = unsafe();
  if (!forbidden && nbytes <= COPIED) memmove(to, from, nbytes);
  return forbidden;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int there, const void* from, int here, size_t nbytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t nbytes, cudaStream_t stream) {
  cudaError_t forbidden = work(stream);
  if (!forbidden && nbytes <= COPIED) memset(at, value, nbytes);
  return forbidden;
}
cudaError_t cudaMemset(void* at, int value, size_t nbytes) { return cudaMemsetAsync(at, value, nbytes, 0); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* at) {
  memset(out, 0, sizeof *out);
  memcpy(out, &at, sizeof at);
  return 0;
}

// The device: an H100. With NULL_CUDA_DEVICES=0 there is none, as on a machine without CUDA's driver.
static cudaError_t absent(void) {
  const char* given = getenv("NULL_CUDA_DEVICES");
  return given && *given == '0' ? answer(cudaErrorInsufficientDriver) : 0;
}
cudaError_t cudaGetDeviceCount(int* out) { return absent() ? (*out = 0, absent()) : (*out = 1, 0); }
cudaError_t cudaGetDevice(int* out) { *out = 0; return absent(); }
cudaError_t cudaSetDevice(int device) { return device == 0 ? absent() : answer(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* out, int device) {
  memset(out, 0, sizeof *out);
  if (absent()) return absent();
  strcpy(out->name, "NVIDIA H100 (null)");
  out->totalGlobalMem = total(), out->sharedMemPerBlock = 49152, out->regsPerBlock = 65536, out->warpSize = 32, out->major = 9;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->multiProcessorCount = 132, out->maxThreadsPerMultiProcessor = 2048, out->maxBlocksPerMultiProcessor = 32;
  out->l2CacheSize = 50 << 20, out->sharedMemPerMultiprocessor = 233472, out->sharedMemPerBlockOptin = 232448;
  out->regsPerMultiprocessor = 65536, out->memoryBusWidth = 5120, out->textureAlignment = 512;
  out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
  return 0;
}
cudaError_t cudaDeviceGetAttribute(int* out, enum cudaDeviceAttr attribute, int device) {
  static const int known[][2] = {
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrWarpSize, 32}, {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrL2CacheSize, 50 << 20},
  };
  *out = 0;
  for (size_t at = 0; at < sizeof known / sizeof *known; ++at)
    if (known[at][0] == (int)attribute) *out = known[at][1];
  return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) { snprintf(out, length, "0000:00:00.0"); return 0; }
cudaError_t cudaDeviceCanAccessPeer(int* out, int a, int b) { *out = 0; return 0; }
cudaError_t cudaDriverGetVersion(int* out) { *out = absent() ? 0 : CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int* out) { *out = CUDART_VERSION; return 0; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return error ? "an error of the null device" : "cudaSuccess";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : cudaGetErrorName(error);
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** out, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult* result) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  *out = driver ? dlsym(driver, name) : NULL;
  if (result) *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *out ? 0 : answer(cudaErrorSymbolNotFound);
}

// Kernels.
static char binary[64];
void** __cudaRegisterFatBinary(void* given) { return (void**)binary; }
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } called;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  called.grid = grid, called.block = block, called.shared = shared, called.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = called.grid, *block = called.block, *shared = called.shared, *(cudaStream_t*)stream = called.stream;
  return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) { *out = (cudaKernel_t)function; return 0; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) { return work(stream); }
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) { return work(stream); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** args) { return work(config->stream); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* out, const void* function) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->binaryVersion = out->ptxVersion = 90;
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void* function, int block, size_t shared) { *out = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void* function, int block, size_t shared, unsigned flags) {
  *out = 2;
  return 0;
}
