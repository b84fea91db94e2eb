// CUDA's compiler, as torch asks it for kernels that it writes as it runs: they are compiled into nothing, and have a name.
#include <stddef.h>

typedef int nvrtcResult;
typedef struct _nvrtcProgram* nvrtcProgram;

nvrtcResult nvrtcVersion(int* major, int* minor) { *major = 13, *minor = 0; return 0; }
const char* nvrtcGetErrorString(nvrtcResult error) { return "an error of the null device"; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char* const expression, const char** out) { *out = "nothing"; return 0; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* out) { *out = 1; return 0; }
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* out) { *out = 0; return 0; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* out) { *out = 1; return 0; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* out) { *out = 0; return 0; }
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* out) { *out = 1; return 0; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* out) { *out = 0; return 0; }
