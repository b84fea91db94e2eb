// Torch's headers want CUDA's runtime as its own compiler sees it. For a host's compiler its functions are enough.
#pragma once
#include <cuda_runtime_api.h>
