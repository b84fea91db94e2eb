// The planned allocator as one of CUDA's. Part of ../runtime/arena/allocator.cpp; forwarders.inc is read off the headers of the torch at hand
// (native.py).
using namespace c10;
using namespace c10::cuda;
using namespace c10::cuda::CUDACachingAllocator;

CUDAAllocator* standing() { return CUDACachingAllocator::get(); }

// The arena in which an address lies, or null.
Region* region_of(const void* given) {
  char* const p = static_cast<char*>(const_cast<void*>(given));
  for (int index = 0, seen = regions_seen.load(std::memory_order_acquire); index < seen; ++index)
    if (p >= regions[index].low.load(std::memory_order_acquire) && p < regions[index].high.load(std::memory_order_acquire)) return &regions[index];
  return nullptr;
}

// Arenas that serve no step now, and in which nothing lies, are PyTorch's again; their steps ask for new ones. Whether there was any.
bool idle_given_back() {
  if (forked.load() || currentStreamCaptureStatusMayInitCtx() != CaptureStatus::None) return false;
  bool any = false;
  for (int index = 0, seen = regions_seen.load(std::memory_order_acquire); index < seen; ++index) {
    Region& region = regions[index];
    std::lock_guard<std::mutex> lock(region.guard);
    if (!region.used || region.dropped || region.mapped == nullptr || region.serving > 0 || !region.live.empty()) continue;
    region.high.store(nullptr);
    region.low.store(kNowhere);
    device::give_back(region.mapped, region.work);
    region.mapped = nullptr;
    any = true;
  }
  if (any) device::inner->emptyCache();  // else requests to come would lie in that one large segment, with gaps that none of them fills
  return any;
}

// What those who watch for memory that runs out are still to be told of this thread's request.
using Untold = std::vector<std::function<void()>>;
thread_local Untold* untold = nullptr;

template <class... Seen>
std::function<void(Seen...)> waiting(std::function<void(Seen...)> observer) {
  return [observer](Seen... seen) {
    if (untold == nullptr) return observer(seen...);
    untold->push_back([=] { observer(seen...); });
  };
}

// What PyTorch's allocator gives, once more where the device had no more than what idle arenas hold: evaluation between steps finds it.
// Observers are told only where that was not enough.
template <class Ask>
auto given(const Ask& ask) {
  Untold calls;
  struct Asked {
    ~Asked() { untold = nullptr; }
  };
  try {
    Asked asked;
    untold = &calls;
    return ask();
  } catch (const OutOfMemoryError&) {
    if (!idle_given_back()) {
      for (const auto& call : calls) call();
      throw;
    }
  }
  return ask();
}

void* theirs(int64_t bytes) {
  return given([bytes] { return original->raw_allocate(bytes); });
}

struct Planned final : CUDAAllocator {
  CUDAAllocator* const inner = device::inner;
#include "forwarders.inc"

  DataPtr allocate(size_t n) override {
    void* const p = served(n);
    if (p != nullptr) return {p, p, &release, Device(DeviceType::CUDA, session->place.device)};
    DataPtr theirs = given([&] { return inner->allocate(n); });
    theirs.compare_exchange_deleter(original_release, &release);  // by its deleter PyTorch knows what this allocator gave
    return theirs;
  }
  void* raw_alloc(size_t n) override {
    void* const p = served(n);
    return p == nullptr ? given([&] { return inner->raw_alloc(n); }) : p;
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
    void* const p = session != nullptr && session->place.stream == stream ? served(n) : nullptr;
    return p == nullptr ? given([&] { return inner->raw_alloc_with_stream(n, stream); }) : p;
  }
  void raw_delete(void* p) override { release(p); }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { inner->copy_data(to, from, count); }

  using CUDAAllocator::recordStream;
  void recordStream(const DataPtr& given, CUDAStream stream) override {
    void* const p = given.get();
    if (p == nullptr || given.get_deleter() != &release) return inner->recordStream(given, stream);
    Region* const region = region_of(p);
    if (region != nullptr) {
      std::lock_guard<std::mutex> lock(region->guard);
      if (region->live.count(static_cast<char*>(p))) device::used_on(static_cast<char*>(p), stream, region->work);
      return;
    }
    DataPtr theirs(p, p, original_release, given.device());
    inner->recordStream(theirs, stream);
    theirs.release_context();
  }
  void* getBaseAllocation(void* p, size_t* size) override {
    Region* const region = region_of(p);
    return inner->getBaseAllocation(region == nullptr ? p : region->mapped, size);
  }
  ShareableHandle shareIpcHandle(void* p) override {
    Region* const region = region_of(p);
    if (region == nullptr) return inner->shareIpcHandle(p);
    ShareableHandle handle = inner->shareIpcHandle(region->mapped);
    handle.offset += static_cast<char*>(p) - region->mapped;
    return handle;
  }
  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override { inner->attachOutOfMemoryObserver(waiting(std::move(observer))); }
  std::string name() override { return inner->name(); }

 private:
  // Memory for a request of the step that this thread runs, where it is of the step's stream; or null.
  static void* served(size_t n) {
    if (n == 0) return nullptr;
    if (session == nullptr || !(device::here() == session->place)) {
      asked_elsewhere(static_cast<int64_t>(n));
      return nullptr;
    }
    return asked(*session, static_cast<int64_t>(n));
  }
};

Planned& planned() {
  static Planned* const one = new Planned;  // never destroyed: tensors may outlive everything
  return *one;
}

void put_before() {
  device::inner = standing();
  CUDACachingAllocator::allocator.store(&planned());
  c10::SetAllocator(c10::kCUDA, &planned(), 1);
}
