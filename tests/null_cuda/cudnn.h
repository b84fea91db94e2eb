// What libraries.c says in cuDNN's words: its types, and the numbers behind its names. cuDNN's package, which has the whole header, is 0.5 GB.
// Its version is the one that torch was built for, and comes from the compiler's command line (build.py).
#pragma once
#include <library_types.h>
#include <stddef.h>
#include <stdint.h>

typedef int cudnnStatus_t, cudnnDataType_t, cudnnTensorFormat_t, cudnnMathType_t, cudnnDeterminism_t, cudnnForwardMode_t;
typedef int cudnnBatchNormMode_t, cudnnBatchNormOps_t, cudnnCTCLossAlgo_t, cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t,
    cudnnConvolutionBwdFilterAlgo_t;
typedef int cudnnRNNAlgo_t, cudnnRNNMode_t, cudnnRNNBiasMode_t, cudnnDirectionMode_t, cudnnRNNInputMode_t, cudnnRNNDataLayout_t;
enum { CUDNN_DATA_DOUBLE = 1, CUDNN_DATA_HALF = 2, CUDNN_DATA_BFLOAT16 = 9 };
enum { CUDNN_TENSOR_NCHW = 0, CUDNN_DETERMINISTIC = 1, CUDNN_FWD_MODE_TRAINING = 1, CUDNN_BIDIRECTIONAL = 1 };
enum { CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM = 1, CUDNN_CONVOLUTION_BWD_DATA_ALGO_1 = 1, CUDNN_CONVOLUTION_BWD_FILTER_ALGO_1 = 1 };
enum { CUDNN_LSTM = 2, CUDNN_GRU = 3, CUDNN_RNN_NO_BIAS = 0, CUDNN_RNN_DOUBLE_BIAS = 2 };

typedef struct cudnnContext* cudnnHandle_t;
typedef struct cudnnTensorStruct* cudnnTensorDescriptor_t;
typedef struct cudnnFilterStruct* cudnnFilterDescriptor_t;
typedef struct cudnnConvolutionStruct* cudnnConvolutionDescriptor_t;
typedef struct cudnnDropoutStruct* cudnnDropoutDescriptor_t;
typedef struct cudnnActivationStruct* cudnnActivationDescriptor_t;
typedef struct cudnnCTCLossStruct* cudnnCTCLossDescriptor_t;
typedef struct cudnnRNNStruct* cudnnRNNDescriptor_t;
typedef struct cudnnRNNDataStruct* cudnnRNNDataDescriptor_t;

// How fast an algorithm was, and what memory it wants: alike for the three ways of a convolution.
typedef struct {
  int algo;
  cudnnStatus_t status;
  float time;
  size_t memory;
  cudnnDeterminism_t determinism;
  cudnnMathType_t mathType;
  int reserved[3];
} cudnnConvolutionFwdAlgoPerf_t, cudnnConvolutionBwdDataAlgoPerf_t, cudnnConvolutionBwdFilterAlgoPerf_t;
