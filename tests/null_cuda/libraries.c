// What torch asks of cuBLAS and cuDNN before it gives them work: handles, versions, sizes of workspaces, where a weight lies. The work itself
// does nothing. Convolutions go by cuDNN's older functions (TORCH_CUDNN_V8_API_DISABLED): they lead through the same operators of torch, and
// ask for workspaces as the newer ones do, of sizes that are made up.
#include "cudnn.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int cublasCreate_v2(void** out) { *out = (void*)0x7000; return 0; }
int cublasLtCreate(void** out) { *out = (void*)0x7100; return 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void* handle, void* a, void* b, void* c, void* d, void* e, void* f, int wanted, void* results, int* found) {
  memset(results, 0, 64);
  *found = 1;
  return 0;
}
int cublasGetVersion_v2(void* handle, int* out) { *out = 130000; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cusparseCreate(void** out) { *out = (void*)0x7200; return 0; }
int cusolverDnCreate(void** out) { *out = (void*)0x7300; return 0; }

// Descriptors: of tensors, filters and recurrent networks alike.
struct look { int dtype, count, extent[8], stride[8], mode, biases, both, width, inner, projected, layers; };
static cudnnStatus_t made(void* out) { *(struct look**)out = calloc(1, sizeof(struct look)); return 0; }
static cudnnStatus_t dropped(void* look) { free(look); return 0; }
#define DESCRIPTOR(kind, type) \
  cudnnStatus_t cudnnCreate##kind##Descriptor(type* out) { return made(out); } \
  cudnnStatus_t cudnnDestroy##kind##Descriptor(type look) { return dropped(look); }
DESCRIPTOR(Tensor, cudnnTensorDescriptor_t)
DESCRIPTOR(Filter, cudnnFilterDescriptor_t)
DESCRIPTOR(Convolution, cudnnConvolutionDescriptor_t)
DESCRIPTOR(Dropout, cudnnDropoutDescriptor_t)
DESCRIPTOR(Activation, cudnnActivationDescriptor_t)
DESCRIPTOR(RNN, cudnnRNNDescriptor_t)
DESCRIPTOR(CTCLoss, cudnnCTCLossDescriptor_t)
DESCRIPTOR(RNNData, cudnnRNNDataDescriptor_t)

static size_t width_of(int dtype) { return dtype == CUDNN_DATA_DOUBLE ? 8 : dtype == CUDNN_DATA_HALF || dtype == CUDNN_DATA_BFLOAT16 ? 2 : 4; }
static cudnnStatus_t set(void* given, int dtype, int count, const int* extent, const int* stride) {
  struct look* look = given;
  look->dtype = dtype, look->count = count;
  for (int at = 0; at < count && at < 8; ++at) look->extent[at] = extent[at], look->stride[at] = stride ? stride[at] : 0;
  for (int at = count - 1, step = 1; !stride && at >= 0; step *= extent[at--]) look->stride[at] = step;
  return 0;
}
static size_t bytes_of(const void* given) {
  const struct look* look = given;
  size_t count = width_of(look->dtype);
  for (int at = 0; at < look->count; ++at) count *= look->extent[at];
  return count;
}
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t look, cudnnDataType_t dtype, int count, const int* extent, const int* stride) {
  return set(look, dtype, count, extent, stride);
}
cudnnStatus_t cudnnSetFilterNdDescriptor(
    cudnnFilterDescriptor_t look, cudnnDataType_t dtype, cudnnTensorFormat_t format, int count, const int* extent) {
  return set(look, dtype, count, extent, NULL);
}
cudnnStatus_t cudnnGetTensorNdDescriptor(
    const cudnnTensorDescriptor_t given, int wanted, cudnnDataType_t* dtype, int* count, int* extent, int* stride) {
  const struct look* look = (const void*)given;
  *dtype = look->dtype, *count = look->count;
  for (int at = 0; at < wanted && at < look->count; ++at) extent[at] = look->extent[at], stride[at] = look->stride[at];
  return 0;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(
    const cudnnFilterDescriptor_t look, int wanted, cudnnDataType_t* dtype, cudnnTensorFormat_t* format, int* count, int* extent) {
  int stride[8];
  *format = CUDNN_TENSOR_NCHW;
  return cudnnGetTensorNdDescriptor((const void*)look, wanted, dtype, count, extent, stride);
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* out) { *out = (void*)0x7400; return 0; }
size_t cudnnGetVersion(void) { return CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100 + CUDNN_PATCHLEVEL; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(cudnnStatus_t status) { return status ? "an error of the null device" : "CUDNN_STATUS_SUCCESS"; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* out) {
  *out = type == MAJOR_VERSION ? CUDNN_MAJOR : type == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return 0;
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t handle, size_t* out) { *out = 1 << 20; return 0; }

// Convolutions: one algorithm each, which wants a quarter of its result, at most 32 MiB.
static size_t wanted(const void* result) {
  const size_t quarter = bytes_of(result) / 4;
  return quarter < (32 << 20) ? quarter : 32 << 20;
}
#define CONVOLUTION(way, short_way, algorithm, a, b, c, result) \
  static cudnnStatus_t chosen_##way(const void* out, int* count, cudnnConvolution##short_way##AlgoPerf_t* found) { \
    memset(found, 0, sizeof *found); \
    found->algo = algorithm, found->time = 0.01f, found->memory = wanted(out), found->determinism = CUDNN_DETERMINISTIC; \
    *count = 1; \
    return 0; \
  } \
  cudnnStatus_t cudnnGetConvolution##way##WorkspaceSize( \
      cudnnHandle_t handle, const a x, const b w, const cudnnConvolutionDescriptor_t by, const c y, cudnnConvolution##short_way##Algo_t chosen, \
      size_t* out) { *out = wanted(result); return 0; } \
  cudnnStatus_t cudnnGetConvolution##way##Algorithm_v7( \
      cudnnHandle_t handle, const a x, const b w, const cudnnConvolutionDescriptor_t by, const c y, const int most, int* count, \
      cudnnConvolution##short_way##AlgoPerf_t* found) { return chosen_##way(result, count, found); }
CONVOLUTION(Forward, Fwd, CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, y)
CONVOLUTION(BackwardData, BwdData, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, y)
cudnnStatus_t cudnnFindConvolutionForwardAlgorithmEx(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const void* xs, const cudnnFilterDescriptor_t w, const void* ws,
    const cudnnConvolutionDescriptor_t by, const cudnnTensorDescriptor_t y, void* ys, const int most, int* count,
    cudnnConvolutionFwdAlgoPerf_t* found, void* space, size_t nbytes) { return chosen_Forward(y, count, found); }
cudnnStatus_t cudnnFindConvolutionBackwardDataAlgorithmEx(
    cudnnHandle_t handle, const cudnnFilterDescriptor_t w, const void* ws, const cudnnTensorDescriptor_t y, const void* ys,
    const cudnnConvolutionDescriptor_t by, const cudnnTensorDescriptor_t x, void* xs, const int most, int* count,
    cudnnConvolutionBwdDataAlgoPerf_t* found, void* space, size_t nbytes) { return chosen_BackwardData(x, count, found); }
CONVOLUTION(BackwardFilter, BwdFilter, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, y)
cudnnStatus_t cudnnFindConvolutionBackwardFilterAlgorithmEx(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const void* xs, const cudnnTensorDescriptor_t y, const void* ys,
    const cudnnConvolutionDescriptor_t by, const cudnnFilterDescriptor_t w, void* ws, const int most, int* count,
    cudnnConvolutionBwdFilterAlgoPerf_t* found, void* space, size_t nbytes) { return chosen_BackwardFilter(w, count, found); }

// Batch norms.
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t z,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t scale, const cudnnActivationDescriptor_t activation, size_t* out) {
  *out = bytes_of(scale) * 4;
  return 0;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t y,
    const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t scale,
    const cudnnActivationDescriptor_t activation, size_t* out) {
  *out = bytes_of(scale) * 4;
  return 0;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, cudnnBatchNormOps_t ops, const cudnnActivationDescriptor_t activation,
    const cudnnTensorDescriptor_t x, size_t* out) {
  *out = bytes_of(x) / 32;
  return 0;
}

// Losses of connectionist classification.
cudnnStatus_t cudnnGetCTCLossWorkspaceSize(
    cudnnHandle_t handle, const cudnnTensorDescriptor_t x, const cudnnTensorDescriptor_t dx, const int* labels, const int* label_lengths,
    const int* lengths, cudnnCTCLossAlgo_t algorithm, cudnnCTCLossDescriptor_t by, size_t* out) { *out = bytes_of(x); return 0; }
cudnnStatus_t cudnnGetCTCLossWorkspaceSize_v8(
    cudnnHandle_t handle, cudnnCTCLossAlgo_t algorithm, cudnnCTCLossDescriptor_t by, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t dx, size_t* out) { *out = bytes_of(x); return 0; }

// Recurrent networks. All matrices of all layers lie one behind the other, then all biases.
cudnnStatus_t cudnnSetRNNDescriptor_v8(
    cudnnRNNDescriptor_t given, cudnnRNNAlgo_t algorithm, cudnnRNNMode_t mode, cudnnRNNBiasMode_t bias, cudnnDirectionMode_t direction,
    cudnnRNNInputMode_t input, cudnnDataType_t dtype, cudnnDataType_t precision, cudnnMathType_t math, int32_t width, int32_t inner,
    int32_t projected, int32_t layers, cudnnDropoutDescriptor_t dropout, uint32_t flags) {
  struct look* look = (void*)given;
  look->dtype = dtype, look->mode = mode, look->both = direction == CUDNN_BIDIRECTIONAL, look->width = width, look->inner = inner;
  look->projected = projected == inner ? 0 : projected, look->layers = layers;
  look->biases = bias == CUDNN_RNN_NO_BIAS ? 0 : bias == CUDNN_RNN_DOUBLE_BIAS ? 2 : 1;
  return 0;
}
static int gates(const struct look* look) { return look->mode == CUDNN_LSTM ? 4 : look->mode == CUDNN_GRU ? 3 : 1; }
static int given_back(const struct look* look) { return look->projected ? look->projected : look->inner; }
static int directions(const struct look* look) { return look->both ? 2 : 1; }
static size_t columns(const struct look* look, int pseudo, int from_input) {
  if (!from_input) return given_back(look);
  return pseudo < directions(look) ? look->width : (size_t)given_back(look) * directions(look);
}
static size_t matrices(const struct look* look, int pseudo) {  // elements of one layer's
  const size_t rows = (size_t)gates(look) * look->inner;
  return rows * (columns(look, pseudo, 1) + columns(look, pseudo, 0)) + (size_t)look->projected * look->inner;
}
static size_t all_matrices(const struct look* look, int before) {
  size_t count = 0;
  for (int pseudo = 0; pseudo < before; ++pseudo) count += matrices(look, pseudo);
  return count;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t handle, cudnnRNNDescriptor_t given, size_t* out) {
  const struct look* look = (const void*)given;
  const int pseudo = look->layers * directions(look);
  *out = width_of(look->dtype) * (all_matrices(look, pseudo) + (size_t)pseudo * look->biases * gates(look) * look->inner);
  return 0;
}
cudnnStatus_t cudnnGetRNNWeightParams(
    cudnnHandle_t handle, cudnnRNNDescriptor_t given, int32_t pseudo, size_t nbytes, const void* space, int32_t id, cudnnTensorDescriptor_t matrix,
    void** matrix_at, cudnnTensorDescriptor_t bias, void** bias_at) {
  const struct look* look = (const void*)given;
  const size_t each = width_of(look->dtype), inner = look->inner, in = columns(look, pseudo, 1), back = columns(look, pseudo, 0);
  const int count = gates(look), projects = id == 2 * count, recurrent = id >= count;
  const int rows = projects ? look->projected : look->inner, wide = projects ? look->inner : recurrent ? back : in;
  size_t at = all_matrices(look, pseudo);
  at += projects ? count * inner * (in + back) : recurrent ? count * inner * in + (id - count) * inner * back : id * inner * in;
  if (matrix_at) *matrix_at = projects && !look->projected ? NULL : (char*)space + each * at;  // either is asked for by itself
  if (matrix) set(matrix, look->dtype, 3, (int[]){1, rows, wide}, NULL);
  const int biased = !projects && (look->biases == 2 || (look->biases == 1 && !recurrent));
  at = all_matrices(look, look->layers * directions(look)) + ((size_t)pseudo * look->biases * count + id) * inner;
  if (bias_at) *bias_at = biased ? (char*)space + each * at : NULL;
  if (bias) set(bias, look->dtype, biased ? 3 : 0, (int[]){1, look->inner, 1}, NULL);
  return 0;
}
cudnnStatus_t cudnnSetRNNDataDescriptor(
    cudnnRNNDataDescriptor_t look, cudnnDataType_t dtype, cudnnRNNDataLayout_t layout, int length, int batch, int width, const int* lengths,
    void* padding) {
  return set(look, dtype, 3, (int[]){length, batch, width}, NULL);
}
cudnnStatus_t cudnnGetRNNTempSpaceSizes(
    cudnnHandle_t handle, cudnnRNNDescriptor_t given, cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t x, size_t* workspace, size_t* reserve) {
  const struct look *look = (const void*)given, *data = (const void*)x;
  const size_t steps = (size_t)data->extent[0] * data->extent[1] * look->inner * directions(look) * width_of(look->dtype);
  if (workspace) *workspace = steps * gates(look);
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? steps * (gates(look) + 1) * look->layers : 0;
  return 0;
}
