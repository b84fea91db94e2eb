// A team of threads that runs one network at a time. Its members spin for a while after each run, then sleep until the next. Where other
// processes take a processor away in the middle of a run, or do not give it back, all would wait at each barrier for as long as the system
// lets others run: for a while then the caller runs alone, which changes no bit.
#include <atomic>
#include <cstdint>
#include <ctime>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include "kernels.hpp"

typedef void (*Network)(const Run*);

namespace {

constexpr int MOST = 255;
pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
std::atomic<int> epoch{0}, left{0}, asleep{0}, waiting{0}, interrupted{0};  // an epoch is the number of a run, and in its last byte how many take part
Team team;
Network network;
float* const* addresses;
int made = 1;
long patience_ns = 0;
constexpr long LEAST_NS = 10'000'000, MOST_NS = 320'000'000, ASLEEP_NS = 300'000;
long alone_ns = 0, alone_until_ns = 0;

// Waits until `epoch` is no longer `seen`: awake for a while, then asleep.
void wait(int seen) {
  long until = now_ns() + patience_ns;
  for (int spins = 1; epoch.load(std::memory_order_acquire) == seen; spins++) {
    relax();
    if (spins % 64 || now_ns() < until) continue;
    asleep.fetch_add(1);
    while (epoch.load() == seen) syscall(SYS_futex, &epoch, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    asleep.fetch_sub(1);
    return;
  }
}

// How often the system has taken the processor from this thread.
long switches() {
  rusage used;
  return getrusage(RUSAGE_THREAD, &used) ? 0 : used.ru_nivcsw;
}

// This thread's part of a run.
void take_part(const Run& run, Network of) {
  long before = run.count > 1 ? switches() : 0;
  of(&run);
  if (run.count > 1 && switches() != before) interrupted.store(1);
}

// After a run of several threads: for how long the next ones are left to the caller alone. It slept for most of a run that was in trouble.
void judge(long taken_ns) {
  bool in_trouble = interrupted.exchange(0) || (team.slept_ns > ASLEEP_NS && team.slept_ns > taken_ns / 2);
  alone_ns = in_trouble ? (alone_ns ? (alone_ns < MOST_NS ? alone_ns * 2 : MOST_NS) : LEAST_NS) : 0;
  if (alone_ns) alone_until_ns = now_ns() + alone_ns;
}

struct Member { int id, seen; };
Member members[MOST];

void* work(void* given) {
  Member* me = (Member*)given;
  for (int seen = me->seen;;) {
    wait(seen);
    seen = epoch.load(std::memory_order_acquire);
    int count = seen & 255;
    if (me->id >= count) continue;
    Run run{&team, me->id, count, addresses};
    take_part(run, network);
    left.fetch_sub(1);
    wake(left, waiting);
  }
  return nullptr;
}

// So many threads, or as many as the system gives; all begin with the epoch to come.
int grown(int count) {
  for (; made < count && made < MOST; made++) {
    members[made] = {made, epoch.load()};
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, work, &members[made]);
    pthread_attr_destroy(&attributes);
    if (failed) break;
  }
  return made < count ? made : count;
}

// How long to wait awake: not at all where there are fewer processors than threads.
int spins_of(int count) {
  cpu_set_t mine;
  return sched_getaffinity(0, sizeof mine, &mine) || CPU_COUNT(&mine) >= count ? 4000 : 0;
}

// In a forked process there are no other threads, and what they held is free.
void forked() {
  made = 1;
  pthread_mutex_init(&running, nullptr);
  left.store(0);
  asleep.store(0);
  waiting.store(0);
  team.arrived.store(0);
  team.asleep.store(0);
}

__attribute__((constructor)) void loaded() { pthread_atfork(nullptr, nullptr, forked); }

}  // namespace

extern "C" {

int lowtide_lanes() { return L; }
int lowtide_registers() { return REGISTERS; }

// Runs a network on `count` threads, the caller's among them; one run at a time.
void lowtide_run(Network given, float* const* at, int count, long spin_us) {
  pthread_mutex_lock(&running);
  count = count > 1 && (!alone_ns || now_ns() >= alone_until_ns) ? grown(count) : 1;
  team.spins = spins_of(count);
  patience_ns = team.spins ? spin_us * 1000 : 0;
  network = given;
  addresses = at;
  long begin = now_ns();
  team.slept_ns = 0;
  if (count > 1) {
    left.store(count - 1);
    epoch.store((((unsigned)epoch.load() >> 8) + 1) << 8 | count);
    wake(epoch, asleep);
  }
  Run run{&team, 0, count, at};
  take_part(run, given);
  for (int now; count > 1 && (now = left.load(std::memory_order_acquire));) team.slept_ns += wait_for(left, now, waiting, team.spins);
  if (count > 1) judge(now_ns() - begin);
  pthread_mutex_unlock(&running);
}

// A number that tells whether constants are what they were, most likely: of one element of each.
uint64_t lowtide_mark(const uint32_t* const* at, const int64_t* place, int count) {
  uint64_t mark = 1469598103934665603ull;
  for (int i = 0; i < count; i++) mark = (mark ^ at[i][place[i]]) * 1099511628211ull;
  return mark;
}
}
