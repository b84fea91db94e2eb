// What the planned allocator wants of a CUDA device: where a step runs, memory for an arena from PyTorch's own allocator, and that nobody
// writes to memory before those who read it on another stream are done.
#pragma once
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <optional>
#include <vector>

namespace device {

using c10::cuda::CUDAStream;
using c10::cuda::CUDACachingAllocator::CUDAAllocator;

constexpr int64_t kAlign = 512;  // bytes, as PyTorch's allocator does
inline int64_t rounded(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// A device and a stream of it.
struct Place {
  c10::DeviceIndex device = -1;
  cudaStream_t stream = nullptr;
  bool operator==(const Place& other) const { return device == other.device && stream == other.stream; }
};

inline CUDAAllocator* inner = nullptr;  // PyTorch's own

inline Place here() {
  const CUDAStream now = c10::cuda::getCurrentCUDAStream();
  return {now.device_index(), now.stream()};
}

// Of one arena: its block, the stream that its memory is given out on, and which other streams use parts of it.
struct Work {
  c10::DataPtr block;
  Place place;
  std::map<char*, std::vector<CUDAStream>> elsewhere;
};

// `after` does what it is given from now on only when `before` has done all so far.
inline void wait(cudaStream_t after, c10::DeviceIndex device, cudaStream_t before) {
  int current = 0;
  C10_CUDA_CHECK(cudaGetDevice(&current));
  if (current != device) C10_CUDA_CHECK(cudaSetDevice(device));
  cudaEvent_t event;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, before));
  C10_CUDA_CHECK(cudaStreamWaitEvent(after, event, 0));
  C10_CUDA_CHECK(cudaEventDestroy(event));
  if (current != device) C10_CUDA_CHECK(cudaSetDevice(current));
}

// Of a large block the whole segment that PyTorch takes of the device for it: in the rest a tensor of others would come to lie, and would keep
// the segment there when a larger arena has to have its place. cuda/forecast.py counts it so, too.
inline int64_t whole(int64_t bytes) {
  constexpr int64_t kHuge = 10 << 20, kGranule = 2 << 20;
  if (bytes < kHuge) return bytes < kAlign ? kAlign : bytes;
  return (bytes + kGranule - 1) / kGranule * kGranule;
}

inline void* take(int64_t bytes, Work& work) {
  work.place = here();
  work.block = inner->allocate(static_cast<size_t>(whole(bytes)));
  return work.block.get();
}

inline void give_back(char*, Work& work) {
  work.block = c10::DataPtr();
  work.elsewhere.clear();
}

// What a step is given from here on is used on another stream than before.
inline void move_to(const Place& place, Work& work) {
  if (place == work.place || work.place.device != place.device) return;
  wait(place.stream, place.device, work.place.stream);
  work.place = place;
  inner->recordStream(work.block, c10::cuda::getCurrentCUDAStream());
}

// A part of the arena is used on another stream: who gets that memory next waits for what it is given until then.
inline void used_on(char* p, CUDAStream stream, Work& work) {
  if (stream.stream() != work.place.stream) work.elsewhere[p].push_back(stream);
}
inline void let_go(char* p, Work& work) {
  const auto found = work.elsewhere.find(p);
  if (found == work.elsewhere.end()) return;
  for (const CUDAStream& stream : found->second) wait(work.place.stream, stream.device_index(), stream.stream());
  work.elsewhere.erase(found);
}

}  // namespace device
