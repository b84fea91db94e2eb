// A team of threads that runs one network at a time. Its members spin for a while after each run, then sleep until the next.
//
// A machine is shared. Where other processes have the processors, a run of several threads waits at each barrier for as long as the system
// lets others run; so a run may be left to the caller alone, which changes no bit. What decides is what runs took: as long as those of
// several threads save time, in sum, they go on; once they lose some, the caller runs alone for a while, longer each time that they lose again.
//
// Nor does every system put two threads on two processors: one that wakes another may find it beside itself, and as they wait for one another
// in turns, no more than one ever wants to run, and nothing moves them. So who finds itself on the processor of another goes elsewhere.
#include <cstdint>
#include <pthread.h>
#include <sched.h>

#include "kernels.hpp"

typedef void (*Network)(const Run*);

extern "C" {
// What runs of one network took so far. All zeros at first.
struct Experience {
  int64_t count;  // of threads; all below is of so many
  int64_t together, spent_ns;  // runs of several threads, and what all took
  int64_t alone, alone_ns;  // runs of the caller alone, since several last lost; and what one takes, at most that where there was none
  int64_t lost_ns;  // by several threads against the caller alone; below zero where they win
  int64_t pause_ns, until_ns;  // for how long several threads rest when they lose, and until when they do
};
}

namespace {

constexpr int MOST = MOST_THREADS;
constexpr long LEAST_PAUSE_NS = 10'000'000, MOST_PAUSE_NS = 320'000'000, CREDIT_NS = 5'000'000;
constexpr long GRACE_NS = 300'000;  // that several threads may lose when they begin: they are asleep, and their caches cold
constexpr int FEWEST_ALONE = 3;
pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
struct alignas(64) Word { Atom<int> now{0}, asleep{0}; };  // and who sleeps until it is another
Word epoch, left;  // an epoch is the number of a run, and in its last byte how many take part; left are those that have not done their share
alignas(64) Atom<int> place[MOST];  // the processor that each was on when it last began
Team team;
alignas(64) Network network;
float* const* addresses;
int made = 1;
Atom<long> patience_ns{0};

struct Member { int id, seen; };
Member members[MOST];

// Leaves a processor that another of the team is on.
void keep_apart(int id, int count) {
  int here = sched_getcpu();
  place[id].store(here, __ATOMIC_RELAXED);
  if (id == 0 || here < 0) return;
  bool beside = false;
  for (int other = 0; other < id; other++) beside |= place[other].load(__ATOMIC_RELAXED) == here;
  cpu_set_t mine, free;
  if (!beside || sched_getaffinity(0, sizeof mine, &mine)) return;
  free = mine;
  for (int other = 0; other < count; other++) {
    int taken = place[other].load(__ATOMIC_RELAXED);
    if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
  }
  if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
  sched_setaffinity(0, sizeof mine, &mine);  // it stays where it is, but may be moved
  place[id].store(sched_getcpu(), __ATOMIC_RELAXED);
}

void* work(void* given) {
  Member* me = (Member*)given;
  for (int seen = me->seen;;) {
    wait_for(epoch.now, [=](int now) { return now != seen; }, epoch.asleep, patience_ns.load(__ATOMIC_RELAXED));
    seen = epoch.now.load(__ATOMIC_ACQUIRE);
    int count = seen & 255;
    if (me->id >= count) continue;
    keep_apart(me->id, count);
    Run run{&team, me->id, count, addresses, team.round};
    network(&run);
    left.now.add(-1);
    wake(&left.now, left.asleep);
  }
  return nullptr;
}

// So many threads, or as many as the system gives; all begin with the epoch to come.
int grown(int count) {
  for (; made < count && made < MOST; made++) {
    members[made] = {made, epoch.now.load()};
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, work, &members[made]);
    pthread_attr_destroy(&attributes);
    if (failed) break;
    pthread_setname_np(thread, "lowtide");  // as top and debuggers show it
  }
  return made < count ? made : count;
}

// No more threads than processors.
int within_processors(int count) {
  cpu_set_t mine;
  if (count < 2 || sched_getaffinity(0, sizeof mine, &mine)) return count;
  return CPU_COUNT(&mine) < count ? CPU_COUNT(&mine) : count;
}

long (*clock_ns)() = now_ns;  // what experience is told by

// Whether the caller runs alone this time: while several threads rest, and a few times before, each once it costs little beside what was spent.
bool is_alone(Experience& its, int count) {
  if (its.count != count) {
    its = {count};
    its.lost_ns = -GRACE_NS;
  }
  if (count == 1) return true;
  if (its.until_ns) return its.alone < FEWEST_ALONE || clock_ns() < its.until_ns;
  return its.alone < FEWEST_ALONE && its.together > 0 && 4 * (its.alone + 1) * its.alone_ns <= its.spent_ns;
}

// What a run took is the next ones' experience.
void learn(Experience& its, bool alone, long taken_ns) {
  if (alone) {
    if (its.alone++ == 0) {
      its.alone_ns = taken_ns;
      its.lost_ns = -GRACE_NS;  // what was won before was not known
    } else {
      its.alone_ns += (taken_ns - its.alone_ns) / (taken_ns < its.alone_ns ? 2 : 8);
    }
    return;
  }
  its.together++;
  its.spent_ns += taken_ns;
  long most_ns = taken_ns * its.count;  // that the caller alone would take for the same work
  if (its.alone == 0 && its.until_ns == 0) its.alone_ns = its.together == 1 || most_ns < its.alone_ns ? most_ns : its.alone_ns;
  its.until_ns = 0;
  its.lost_ns += taken_ns - its.alone_ns;
  long credit = CREDIT_NS > its.alone_ns ? CREDIT_NS : its.alone_ns;
  if (its.lost_ns <= -credit) its.lost_ns = -credit, its.pause_ns = 0;
  if (its.lost_ns <= 0) return;
  its.pause_ns = its.pause_ns ? (its.pause_ns < MOST_PAUSE_NS ? its.pause_ns * 2 : MOST_PAUSE_NS) : LEAST_PAUSE_NS;
  its.until_ns = clock_ns() + its.pause_ns;
  its.alone = 0;
  its.lost_ns = -GRACE_NS;
}

void run_together(Network given, float* const* at, int count) {
  left.now.store(count - 1);
  epoch.now.store((((unsigned)epoch.now.load() >> 8) + 1) << 8 | count);
  wake(&epoch.now, epoch.asleep);
  Run run{&team, 0, count, at, team.round};
  given(&run);
  wait_for(left.now, [](int now) { return now == 0; }, left.asleep, AWAKE_NS);
  team.round = run.round;
}

// In a forked process there are no other threads, and what they held is free.
void forked() {
  for (int id = 0; id < made; id++)
    for (Flag& each : team.flags[id]) each.round.store(team.round), each.asleep.store(0);
  made = 1;
  pthread_mutex_init(&running, nullptr);
  left.now.store(0);
  left.asleep.store(0);
  epoch.asleep.store(0);
}

__attribute__((constructor)) void loaded() {
  for (auto& each : place) each.store(-1);
  pthread_atfork(nullptr, nullptr, forked);
}

}  // namespace

extern "C" {

int lowtide_lanes() { return L; }
int lowtide_registers() { return REGISTERS; }

// For tests, whose time must not be the machine's: another clock, none for the machine's.
void lowtide_clock(long (*clock)()) { clock_ns = clock ? clock : now_ns; }

// Runs a network on up to `count` threads, the caller's among them; one run at a time. Without experience on just as many.
void lowtide_run(Network given, float* const* at, int count, long spin_us, Experience* its) {
  pthread_mutex_lock(&running);
  if (its) count = within_processors(count);
  bool alone = (its && is_alone(*its, count)) || (count = grown(count)) == 1;
  network = given;
  addresses = at;
  patience_ns.store(spin_us * 1000, __ATOMIC_RELAXED);
  long begin = clock_ns();
  if (alone) {
    Run run{&team, 0, 1, at};
    given(&run);
  } else {
    keep_apart(0, count);
    run_together(given, at, count);
  }
  if (its && its->count > 1) learn(*its, alone, clock_ns() - begin);
  pthread_mutex_unlock(&running);
}

// A number that tells whether constants are what they were, most likely: of one element of each.
uint64_t lowtide_mark(const uint32_t* const* at, const int64_t* place, int count) {
  uint64_t mark = 1469598103934665603ull;
  for (int i = 0; i < count; i++) mark = (mark ^ at[i][place[i]]) * 1099511628211ull;
  return mark;
}

// The same of whole pieces, each word by a weight of its own, so that words that change places are seen, too.
uint64_t lowtide_sum(const uint32_t* const* at, const int64_t* words, int count) {
  uint64_t sum = 0;
  uint32_t weight = 1;
  for (int i = 0; i < count; i++)
    for (int64_t j = 0; j < words[i]; j++, weight += 2) sum += uint64_t(at[i][j]) * weight;
  return sum;
}
}
