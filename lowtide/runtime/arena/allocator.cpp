// The planned allocator: stands before PyTorch's CPU allocator, records what one step asks for, and serves later steps from one arena at
// planned offsets (MODeL, section 4.5). Built by native.py, driven by allocator.py.
//
// What makes it safe is one rule that rests on no recording: a block is served only where no block of the arena is alive, whoever owns
// that one and whatever step it stems from. A recording that does not fit costs time, never a wrong number.
//
// A thread that runs no step asks PyTorch's allocator as before, but for one pointer of its own that is read. Memory that an arena gave
// may be let go by any thread, after the step, and after the arena's owner is gone. In a forked child nothing is served or recorded, and
// no lock is taken: it may have been closed by a thread that the child does not have.
//
// What has to end once it has begun begins and ends in one function here, which calls back what runs in between. Python raises interrupts
// between any two of its own instructions, but not within a call of C: so none can come after a beginning and before its end.
//
// With LOWTIDE_CUDA it stands before PyTorch's CUDA allocator instead, and takes its arenas from that. All that differs is in
// ../../cuda/device.hpp, and named `device`.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#ifdef LOWTIDE_CUDA
#include "device.hpp"
#endif

namespace {

constexpr int kRegions = 1024;      // at once; a program has one arena for each optimized step
constexpr size_t kLookAhead = 256;  // requests that may be missing from a step before it is lost
constexpr int64_t kHugePage = 2 << 20;  // bytes
constexpr int64_t kSlack = 4096;    // mapped beyond the last block: vector loads may read past a tensor's end
char* const kNowhere = reinterpret_cast<char*>(UINTPTR_MAX);

// Why requests can be neither recorded nor served; allocator.py has the sentences.
enum Answer : int { kYes = 0, kForked = 1, kNested = 2, kReplaced = 3, kTooSmall = 4, kNoRawMemory = 5, kNoMemory = 6 };

// Calls what allocator.py hands over: Python's own PyObject_CallNoArgs, so that this file is built without Python. Null where it raised.
using Call = void* (*)(void*);

// What a step asked for, and what became of it. allocator.py knows this layout.
struct Counts {
  int64_t requests, request_bytes;         // by the step's thread
  int64_t served, served_bytes;            // from the arena
  int64_t outliving, outliving_bytes;      // planned to be PyTorch's: alive at the end of the recorded step
  int64_t unexpected, unexpected_bytes;    // not what was recorded at this place
  int64_t occupied, occupied_bytes;        // recorded, but something still lies there
  int64_t absent;                          // recorded, and not asked for
  int64_t elsewhere, elsewhere_bytes;      // asked by other threads meanwhile
};

// Memory of one arena. Never deleted: a thread may be looking at its limits while it is given back.
struct Region {
  std::atomic<char*> low{kNowhere}, high{nullptr};  // of what may be served; empty while unused
  std::mutex guard;                                 // of all below
  bool used = false, dropped = false;
  int serving = 0;         // sessions
  char* mapped = nullptr;  // null while unused, and where the device had no more and it was given back
  int64_t mapped_bytes = 0;
  std::map<char*, int64_t> live;  // where -> bytes
#ifdef LOWTIDE_CUDA
  device::Work work;
#endif
};

// Room for the workspace of one operator: what it asks for there no script knows.
struct Space {
  int64_t offset, bytes, step;
};

struct Script {
  std::vector<int64_t> bytes, offset;  // of each request; an offset below 0: not from the arena
  std::vector<int64_t> step;           // of a guess, by request and ascending: the node that asks, in an order that only it knows; else empty
  std::vector<Space> spaces;           // by their steps
  int64_t arena_bytes = 0;
  bool up_to = false;  // requests may be smaller: those of batches of other shapes

  bool fits(size_t at, int64_t asked) const { return up_to ? asked <= bytes[at] : asked == bytes[at]; }
};

struct Recording {
  std::mutex guard;
  std::vector<int64_t> bytes, born, died;  // in ticks: one for each request and each release; died < 0: alive at the end
  std::unordered_map<void*, int64_t> alive;
  int64_t clock = 0;
  bool incomplete = false;  // there was no memory to note a request
};

struct Session {
  Region* region;        // or null: then nothing is served
  const Script* script;
  Recording* recording;  // or null: then nothing is noted
  size_t next;           // request of the script
  int64_t last_bytes;    // of the request before
  Counts counts;
  std::vector<bool> taken;  // of a guess, by request
  int64_t step = -1;        // of a guess: the node that runs
  void* moving = nullptr;   // the next request is for this block
#ifdef LOWTIDE_CUDA
  device::Place place;  // where it began: requests of other streams are not its own
#endif
};

c10::Allocator* original = nullptr;
c10::DeleterFnPtr original_release = nullptr;
Region* const regions = new Region[kRegions];  // never destroyed: tensors may outlive this library's static objects
std::atomic<int> regions_seen{0};
std::mutex regions_guard;
thread_local Session* session = nullptr;
std::atomic<bool> forked{false};
std::atomic<int> sessions{0};
std::atomic<int64_t> elsewhere{0}, elsewhere_bytes{0};
// The recordings that run: more than one only where several threads record at once.
std::atomic<int> recordings{0};
std::mutex recordings_guard;
std::vector<Recording*>& recordings_list = *new std::vector<Recording*>;

void unmap(Region& region) {  // under its guard
  region.high.store(nullptr);
  region.low.store(kNowhere);
#ifdef LOWTIDE_CUDA
  device::give_back(region.mapped, region.work);
#else
  munmap(region.mapped, region.mapped_bytes);
#endif
  region.mapped = nullptr;
  region.used = region.dropped = false;
}

void let_pages_go(char* low, char* high) {  // those that lie between, whole
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t from = (reinterpret_cast<uintptr_t>(low) + page - 1) / page * page, to = reinterpret_cast<uintptr_t>(high) / page * page;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

// Of an arena whose owner is gone the system gets back what lies between the blocks that are still alive.
void thin_out(Region& region) {  // under its guard
#ifdef LOWTIDE_CUDA
  return;  // it is one block of PyTorch's
#endif
  char* from = region.mapped;
  for (const auto& block : region.live) {
    let_pages_go(from, block.first);
    from = block.first + block.second;
  }
  let_pages_go(from, region.mapped + region.mapped_bytes);
}

// Whether `p` was an arena's; it no longer is.
bool give_back(char* p) {
  const int seen = regions_seen.load(std::memory_order_acquire);
  for (int index = 0; index < seen; ++index) {
    Region& region = regions[index];
    if (p >= region.high.load(std::memory_order_acquire) || p < region.low.load(std::memory_order_acquire)) continue;
    if (forked.load(std::memory_order_relaxed)) return true;  // a copy of the parent's memory, whose locks nobody may ever open
    {
      std::lock_guard<std::mutex> lock(region.guard);
      if (region.live.find(p) == region.live.end()) continue;  // the limits changed while they were read
    }
#ifndef LOWTIDE_CUDA
    c10::profiledCPUMemoryReporter().Delete(p);  // before the bytes can be served, and reported, again
#endif
    std::lock_guard<std::mutex> lock(region.guard);
#ifdef LOWTIDE_CUDA
    device::let_go(p, region.work);
#endif
    region.live.erase(p);
    if (region.dropped && region.live.empty()) unmap(region);
    return true;
  }
  return false;
}

void note_release(void* p) {
  std::lock_guard<std::mutex> all(recordings_guard);
  for (Recording* recording : recordings_list) {
    std::lock_guard<std::mutex> lock(recording->guard);
    auto found = recording->alive.find(p);
    if (found == recording->alive.end()) continue;
    recording->died[found->second] = recording->clock++;
    recording->alive.erase(found);
    return;
  }
}

void note_request(Recording& recording, void* p, int64_t bytes) {
  std::lock_guard<std::mutex> lock(recording.guard);
  if (recording.incomplete) return;
  try {
    recording.bytes.push_back(bytes);
    recording.born.push_back(recording.clock++);
    recording.died.push_back(-1);
    recording.alive[p] = static_cast<int64_t>(recording.bytes.size()) - 1;
  } catch (const std::bad_alloc&) {  // the step goes on: it is its recording that is of no use
    recording.incomplete = true;
    recording.alive.clear();
  }
}

// Whether releases are noted in a recording from here on.
bool listed(Recording* recording) {
  std::lock_guard<std::mutex> all(recordings_guard);
  try {
    recordings_list.push_back(recording);
  } catch (const std::bad_alloc&) {
    return false;
  }
  recordings.fetch_add(1);
  return true;
}

void unlisted(Recording* recording) {
  std::lock_guard<std::mutex> all(recordings_guard);
  recordings_list.erase(std::find(recordings_list.begin(), recordings_list.end(), recording));
  recordings.fetch_sub(1);
}

#ifdef LOWTIDE_CUDA
// A place that was taken for a workspace is still to be taken by the result that it was guessed for.
void untaken(Session& mine, const char* p) {
  const Script& script = *mine.script;
  const char* const low = mine.region->low.load();
  for (size_t at = mine.next; at < script.step.size() && script.step[at] == mine.step; ++at)
    if (low + script.offset[at] == p) mine.taken[at] = false;
}
#endif

void release(void* p) {
  if (p == nullptr) return;
  if (recordings.load(std::memory_order_relaxed) > 0) note_release(p);
#ifdef LOWTIDE_CUDA
  if (session != nullptr && !session->taken.empty()) untaken(*session, static_cast<char*>(p));
#endif
  if (!give_back(static_cast<char*>(p))) original_release(p);
}

// The recorded request that this one is, or the script's length: the next one; or, where requests were left out or replaced, a later one
// that fits and whose forerunner does too. A request too many leaves the place as it is.
size_t place_of(const Session& mine, int64_t bytes) {
  const Script& script = *mine.script;
  const size_t next = mine.next, count = script.bytes.size(), end = std::min(count, next + kLookAhead);
  if (next < count && script.fits(next, bytes)) return next;
  for (size_t at = next + 1; at < end; ++at)
    if (script.fits(at, bytes) && (at == next + 1 || script.fits(at - 1, mine.last_bytes))) return at;
  return count;
}

// Whether nothing lies at a place; `above` is the first block from there on.
bool is_free(const Region& region, std::map<char*, int64_t>::const_iterator above, char* p, int64_t bytes) {  // under its guard
  if (above != region.live.end() && above->first < p + bytes) return false;
  return above == region.live.begin() || std::prev(above)->first + std::prev(above)->second <= p;
}

// Whether there was memory to note a block; without, it is not given out.
bool noted(Region& region, std::map<char*, int64_t>::iterator above, char* p, int64_t bytes) {  // under its guard
  try {
    region.live.emplace_hint(above, p, bytes);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

#ifdef LOWTIDE_CUDA
// Memory for a request that has no place of its own, or whose place is taken: the smallest gap that holds it now, of those that none of the
// next requests is to have; or none of the node that runs, as most such blocks are gone when it is done; or any; or null. There is nothing
// beside the arena that a limit would leave room for.
void* squeeze(Session& mine, int64_t bytes) {
  constexpr size_t kNext = 48;  // requests
  Region& region = *mine.region;
  const Script& script = *mine.script;
  char *const low = region.low.load(), *const high = region.high.load();
  const int64_t needed = device::rounded(bytes);
  size_t now = mine.next, soon = std::min(script.bytes.size(), mine.next + kNext);  // from the next on
  while (now < script.step.size() && script.step[now] == mine.step) ++now;
  std::lock_guard<std::mutex> lock(region.guard);
  for (const size_t until : {soon, now, mine.next}) {
    std::vector<std::pair<char*, char*>> taken;
    for (size_t at = mine.next; at < until; ++at)
      if (script.offset[at] >= 0) taken.emplace_back(low + script.offset[at], low + script.offset[at] + script.bytes[at]);
    for (const auto& block : region.live) taken.emplace_back(block.first, block.first + device::rounded(block.second));
    taken.emplace_back(high, high);
    std::sort(taken.begin(), taken.end());
    char *from = low, *best = nullptr;
    int64_t best_bytes = INT64_MAX;
    for (const auto& [begin, end] : taken) {
      if (begin - from >= needed && begin - from < best_bytes) best = from, best_bytes = begin - from;
      from = std::max(from, end);
    }
    if (best != nullptr && noted(region, region.live.lower_bound(best), best, bytes)) return best;
  }
  return nullptr;
}

// The guessed request that this one is, or their number: of the node that runs, in any order.
size_t guessed(const Session& mine, int64_t bytes) {
  const Script& script = *mine.script;
  const size_t count = script.bytes.size();
  for (size_t at = mine.next; at < count && script.step[at] == mine.step; ++at)
    if (!mine.taken[at] && script.fits(at, bytes)) return at;
  return count;
}

// Memory for a request that no storage of a guess is: in the room for the workspace of the node that runs; or null.
void* within_spaces(Session& mine, int64_t bytes) {
  const Script& script = *mine.script;
  const int64_t needed = device::rounded(bytes);
  auto space = std::partition_point(script.spaces.begin(), script.spaces.end(), [&](const Space& each) { return each.step < mine.step; });
  Region& region = *mine.region;
  std::lock_guard<std::mutex> lock(region.guard);
  for (; space != script.spaces.end() && space->step == mine.step; ++space) {
    char *from = region.low.load() + space->offset, *const end = from + space->bytes;
    auto above = region.live.upper_bound(from);
    if (above != region.live.begin()) from = std::max(from, std::prev(above)->first + device::rounded(std::prev(above)->second));
    for (;; ++above) {
      const bool none = above == region.live.end() || above->first >= end;
      if ((none ? end : above->first) - from >= needed && noted(region, above, from, bytes)) return from;
      if (none) break;
      from = above->first + device::rounded(above->second);
    }
  }
  return nullptr;
}

// The guessed request that this one is, taken; or their number, and with it a place in the room for workspaces where there is one.
size_t guessed_place(Session& mine, int64_t bytes, void*& within) {
  const size_t at = guessed(mine, bytes);
  if (at == mine.script->bytes.size())
    within = within_spaces(mine, bytes);
  else
    mine.taken[at] = true;
  return at;
}
#else
void* squeeze(Session&, int64_t) { return nullptr; }
size_t guessed_place(Session& mine, int64_t, void*&) { return mine.script->bytes.size(); }
#endif

// Memory for a request from the arena, or null.
void* serve(Session& mine, int64_t bytes) {
  Counts& counts = mine.counts;
  const bool guess = !mine.taken.empty();
  void* within = nullptr;
  const size_t at = guess ? guessed_place(mine, bytes, within) : place_of(mine, bytes);
  mine.last_bytes = bytes;
  if (at == mine.script->bytes.size()) {
    counts.unexpected += 1, counts.unexpected_bytes += bytes;
    return within != nullptr ? within : squeeze(mine, bytes);
  }
  if (!guess) {
    counts.absent += static_cast<int64_t>(at - mine.next);
    mine.next = at + 1;
  }
  const int64_t offset = mine.script->offset[at];
  if (offset < 0) {
    counts.outliving += 1, counts.outliving_bytes += bytes;
    return nullptr;
  }
  Region& region = *mine.region;
  char* const p = region.low.load(std::memory_order_relaxed) + offset;
  bool free_there = true;
  {
    std::lock_guard<std::mutex> lock(region.guard);
    auto above = region.live.lower_bound(p);
    if (!is_free(region, above, p, bytes) || !noted(region, above, p, bytes)) {
      counts.occupied += 1, counts.occupied_bytes += bytes;
      free_there = false;
    }
  }
  if (!free_there) return squeeze(mine, bytes);
  counts.served += 1, counts.served_bytes += bytes;
#ifndef LOWTIDE_CUDA
  c10::profiledCPUMemoryReporter().New(p, bytes);  // as PyTorch's own allocator does
#endif
  return p;
}

void* theirs(int64_t bytes);  // memory of PyTorch's

// In a recording a block that moves is the one that it was.
void note_move(Recording& recording, void* from, void* to) {
  std::lock_guard<std::mutex> lock(recording.guard);
  const auto found = recording.alive.find(from);
  if (found == recording.alive.end()) return;
  const int64_t index = found->second;
  recording.alive.erase(found);
  recording.alive[to] = index;
}

// Memory for a request of this thread's session, or null: then it is PyTorch's to give.
void* asked(Session& mine, int64_t bytes) {
  if (mine.moving != nullptr) {
    void* const to = serve(mine, bytes);
    if (to != nullptr) note_move(*mine.recording, mine.moving, to);
    mine.moving = nullptr;
    if (to != nullptr) return to;
  }
  mine.counts.requests += 1, mine.counts.request_bytes += bytes;
  void* p = mine.region == nullptr ? nullptr : serve(mine, bytes);
  if (mine.recording == nullptr) return p;
  if (p == nullptr) p = theirs(bytes);
  note_request(*mine.recording, p, bytes);
  return p;
}

void asked_elsewhere(int64_t bytes) {
  if (sessions.load(std::memory_order_relaxed) == 0) return;
  elsewhere.fetch_add(1, std::memory_order_relaxed);
  elsewhere_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

#ifdef LOWTIDE_CUDA
#include "planned.hpp"
#else
c10::Allocator* standing() { return c10::GetCPUAllocator(); }
void* theirs(int64_t bytes) { return original->raw_allocate(bytes); }

struct Planned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    Session* const mine = session;
    void* p = nullptr;
    if (mine != nullptr && n > 0)
      p = asked(*mine, static_cast<int64_t>(n));
    else if (n > 0)
      asked_elsewhere(static_cast<int64_t>(n));
    if (p == nullptr) p = original->raw_allocate(n);
    return {p, p, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { original->copy_data(to, from, count); }
};

Planned& planned() {
  static Planned* const one = new Planned;  // never destroyed: tensors may outlive everything
  return *one;
}

void put_before() { c10::SetCPUAllocator(&planned(), 255); }
#endif

void after_fork() {
  forked.store(true);
  session = nullptr;
  sessions.store(0);
  recordings.store(0);
}

Answer may_begin() {
  if (forked.load()) return kForked;
  if (session != nullptr) return kNested;
  return standing() == &planned() ? kYes : kReplaced;
}

// Whether a session may be served from a region that is there and has room for its script; it stays there until `run` is over.
bool claimed(Region* region, const Script* script) {
  if (region == nullptr) return true;
  std::lock_guard<std::mutex> lock(region->guard);
  if (region->mapped == nullptr || script->arena_bytes > region->high.load() - region->low.load()) return false;
  region->serving += 1;
  return true;
}

// Calls back with this thread's requests in `mine`, which may begin and has its region.
void* run(Session& mine, Call call, void* work) {
  mine.counts.elsewhere = -elsewhere.load();
  mine.counts.elsewhere_bytes = -elsewhere_bytes.load();
#ifdef LOWTIDE_CUDA
  mine.place = device::here();
  if (mine.region != nullptr) device::move_to(mine.place, mine.region->work);
#endif
  session = &mine;
  sessions.fetch_add(1);
  void* const result = call(work);
  if (session == &mine) {  // in a child that was forked meanwhile, it has ended already
    session = nullptr;
    sessions.fetch_sub(1);
  }
  mine.counts.elsewhere += elsewhere.load();
  mine.counts.elsewhere_bytes += elsewhere_bytes.load();
  if (mine.region != nullptr && !forked.load()) {
    std::lock_guard<std::mutex> lock(mine.region->guard);
    mine.region->serving -= 1;
  }
  return result;
}

}  // namespace

extern "C" {

// Puts the planned allocator before the one that is there, once. Not to be called while other threads allocate for the first time.
int lowtide_install() {
  static std::mutex once;
  std::lock_guard<std::mutex> lock(once);
  if (forked.load()) return kForked;
  if (original != nullptr) return kYes;
  c10::Allocator* const before = standing();
  if (before->raw_deleter() == nullptr) return kNoRawMemory;
  if (pthread_atfork(nullptr, nullptr, &after_fork) != 0) return kNoRawMemory;
  original_release = before->raw_deleter();
  original = before;
  put_before();
  return standing() == &planned() ? kYes : kReplaced;
}

// Memory for an arena. What is made is noted here, where its owner looks: also where the owner is interrupted right after.
int lowtide_region(int64_t bytes, void** made) {
  if (forked.load()) return kForked;
  if (bytes < 0 || bytes > (int64_t(1) << 62)) return kNoMemory;
  const bool huge = bytes >= kHugePage;
  const int64_t needed = bytes + kSlack + (huge ? kHugePage : 0);
  std::lock_guard<std::mutex> all(regions_guard);
  Region* const region = std::find_if(regions, regions + kRegions, [](Region& each) {
    std::lock_guard<std::mutex> lock(each.guard);
    return !each.used;
  });
  if (region == regions + kRegions) return kNoMemory;
#ifdef LOWTIDE_CUDA
  void* mapped = nullptr;
  try {
    mapped = given([&] { return device::take(bytes, region->work); });
  } catch (const c10::Error&) {  // out of memory
    return kNoMemory;
  }
#else
  void* const mapped = mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return kNoMemory;
#endif
  std::lock_guard<std::mutex> lock(region->guard);
  uintptr_t low = reinterpret_cast<uintptr_t>(mapped);
#ifndef LOWTIDE_CUDA
  if (huge) {  // whole large pages only: one that reaches beyond the arena would be resident for nothing
    low = (low + kHugePage - 1) / kHugePage * kHugePage;
    madvise(reinterpret_cast<void*>(low), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
#endif
  region->mapped = static_cast<char*>(mapped);
  region->mapped_bytes = needed;
  region->used = true;
  region->low.store(reinterpret_cast<char*>(low), std::memory_order_release);
  region->high.store(reinterpret_cast<char*>(low) + bytes, std::memory_order_release);
  const int seen = static_cast<int>(region - regions) + 1;
  if (seen > regions_seen.load()) regions_seen.store(seen, std::memory_order_release);
  *made = region;
  return kYes;
}

// The arena's owner is gone: it goes too, but for the pages of blocks that lie in it, and for those with the last block. Nobody may be
// served from it.
void lowtide_region_drop(void* handle) {
  if (forked.load()) return;
  Region& region = *static_cast<Region*>(handle);
  std::lock_guard<std::mutex> lock(region.guard);
  region.dropped = true;
  region.live.empty() ? unmap(region) : thin_out(region);
}

void* lowtide_region_base(void* handle) { return static_cast<Region*>(handle)->low.load(); }

// Whether its memory is there: where the device has no more, PyTorch takes that of an idle arena (planned.hpp).
int64_t lowtide_region_there(void* handle) {
  if (forked.load()) return 1;
  Region& region = *static_cast<Region*>(handle);
  std::lock_guard<std::mutex> lock(region.guard);
  return region.mapped != nullptr;
}

int64_t lowtide_region_live(void* handle) {
  if (forked.load()) return 0;
  Region& region = *static_cast<Region*>(handle);
  std::lock_guard<std::mutex> lock(region.guard);
  return static_cast<int64_t>(region.live.size());
}

int lowtide_script(
    int64_t count, const int64_t* bytes, const int64_t* offset, int up_to, const int64_t* step, int64_t space_count, const int64_t* spaces,
    void** made) try {
  auto script = std::make_unique<Script>();
  script->up_to = up_to != 0;
  script->bytes.assign(bytes, bytes + count);
  script->offset.assign(offset, offset + count);
  for (int64_t at = 0; at < count; ++at)
    if (offset[at] >= 0) script->arena_bytes = std::max(script->arena_bytes, offset[at] + bytes[at]);
  if (step != nullptr) script->step.assign(step, step + count);
  for (const int64_t* each = spaces; each != spaces + 3 * space_count; each += 3)
    script->spaces.push_back({each[0], each[1], each[2]}), script->arena_bytes = std::max(script->arena_bytes, each[0] + each[1]);
  *made = script.release();
  return kYes;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

void lowtide_script_drop(void* handle) { delete static_cast<Script*>(handle); }

int lowtide_recording(void** made) {
  *made = new (std::nothrow) Recording;
  return *made == nullptr ? kNoMemory : kYes;
}

void lowtide_recording_drop(void* handle) { delete static_cast<Recording*>(handle); }

// Calls `work` back and serves this thread's requests meanwhile; or, with an answer why not, calls `otherwise`.
void* lowtide_serve(void* region_handle, const void* script_handle, Counts* counts, int* answer, Call call, void* work, void* otherwise) {
  Region* const region = static_cast<Region*>(region_handle);
  const Script* const script = static_cast<const Script*>(script_handle);
  *answer = may_begin();
  if (*answer == kYes && !claimed(region, script)) *answer = kTooSmall;
  if (*answer != kYes) return call(otherwise);
  Session mine{region, script, nullptr, 0, 0, {}};
  void* const result = run(mine, call, work);
  *counts = mine.counts;
  counts->absent += static_cast<int64_t>(script->bytes.size() - mine.next);
  return result;
}

// Calls `work` back and records this thread's requests meanwhile, which a region serves by a script where there is one; or, with an answer
// why not, calls `otherwise`.
void* lowtide_record(
    void* handle, void* region, const void* script, int* answer, Call call, void* work, void* otherwise) {
  Recording* const recording = static_cast<Recording*>(handle);
  *answer = may_begin();
  if (*answer == kYes && !listed(recording)) *answer = kNoMemory;
  if (*answer == kYes && !claimed(static_cast<Region*>(region), static_cast<const Script*>(script))) {
    unlisted(recording);
    *answer = kTooSmall;
  }
  if (*answer != kYes) return call(otherwise);
  Session mine{static_cast<Region*>(region), static_cast<const Script*>(script), recording, 0, 0, {}};
  if (mine.script != nullptr) try {
      mine.taken.assign(mine.script->step.size(), false);
    } catch (const std::bad_alloc&) {  // then it is served in order
    }
  void* const result = run(mine, call, work);
  if (!forked.load()) unlisted(recording);
  return result;
}

// What this thread asks for from here on is asked for by the node at this place of a plan, of which a guess serves it. Places ascend.
void lowtide_at(int64_t step) {
  if (session == nullptr || session->taken.empty()) return;
  session->step = step;
  const std::vector<int64_t>& steps = session->script->step;
  while (session->next < steps.size() && steps[session->next] < step) ++session->next;
}

// Whether a result of the node that has run lies elsewhere in the arena than a guess has it, as a workspace of its size came first, and can
// move there now: then the next request is for it.
int lowtide_moves(void* block) {
  if (session == nullptr || session->taken.empty()) return 0;
  Session& mine = *session;
  const Script& script = *mine.script;
  Region& region = *mine.region;
  char *const low = region.low.load(), *const p = static_cast<char*>(block);
  std::lock_guard<std::mutex> lock(region.guard);
  const auto found = region.live.find(p);
  if (found == region.live.end()) return 0;
  bool any = false;
  for (size_t at = mine.next; at < script.step.size() && script.step[at] == mine.step; ++at) {
    char* const there = low + script.offset[at];
    if (script.offset[at] < 0 || !script.fits(at, found->second)) continue;
    if (there == p) return 0;
    any |= !mine.taken[at] && is_free(region, region.live.lower_bound(there), there, found->second);
  }
  if (any) mine.moving = p;
  return any;
}

// Calls `work` back; what it asks for belongs to no step.
void* lowtide_aside(Call call, void* work) {
  Session* const mine = session;
  session = nullptr;
  void* const result = call(work);
  if (!forked.load()) session = mine;
  return result;
}

// Calls `work` back with a flag up that was down, or else `otherwise`.
void* lowtide_alone(int* flag, Call call, void* work, void* otherwise) {
  if (__atomic_exchange_n(flag, 1, __ATOMIC_SEQ_CST) != 0) return call(otherwise);
  void* const result = call(work);
  __atomic_store_n(flag, 0, __ATOMIC_SEQ_CST);
  return result;
}

// How many requests a recording has; less than 0 where there was no memory for all of them.
int64_t lowtide_recorded(const void* handle) {
  const Recording* const recording = static_cast<const Recording*>(handle);
  return recording->incomplete ? -1 : static_cast<int64_t>(recording->bytes.size());
}

// Copies a recording that has ended.
void lowtide_take(const void* handle, int64_t* bytes, int64_t* born, int64_t* died) {
  const Recording* const recording = static_cast<const Recording*>(handle);
  std::copy(recording->bytes.begin(), recording->bytes.end(), bytes);
  std::copy(recording->born.begin(), recording->born.end(), born);
  std::copy(recording->died.begin(), recording->died.end(), died);
}

// Gives back to the system what malloc keeps of memory that was let go: what a recorded step used would lie beside the arena for ever.
void lowtide_trim() {
#ifdef LOWTIDE_CUDA
  device::inner->emptyCache();
#elif defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // extern "C"
