// One call of a network, from the tuple of its arguments on: whether all is as in a call before, seen word by word, and then the run.
//
// A network of half a millisecond leaves nothing of Python in a near cache. Each question to a tensor (its shape, its device) then takes
// microseconds, all of them as long as a tenth of the network. Here each is a comparison of a word in what the objects know of themselves.
#include <cstdint>
#include <cstring>

extern "C" {

typedef void (*Runs)(void* network, void* const* at, int count, long spin_us, void* experience);

// Where objects have what they know of themselves, in bytes.
struct Offsets {
  int64_t length, items;  // of a tuple
  int64_t kind, tensor;  // of a Python object, and of one that is a tensor
  int64_t storage, data, offset;  // of torch's tensor, of its storage, of the tensor again
};

struct Call {
  Offsets offsets;
  const void* kind;  // that arguments are of
  int64_t arguments, looks;  // words of each that are compared
  const int64_t* look;  // [looks]: where, in bytes
  const uint64_t* mask;  // [looks]: which bits of them
  const uint64_t* looked;  // [arguments, looks]: what they are
  int64_t live;
  const int64_t* which;  // [live]: the arguments that a network reads
  const int64_t* item_bytes;  // [live]
  Runs runs;
  void *network, *experience;
  int64_t spin_us;
};

// Words of anything else that must be what they were, and of numbers half as long.
struct Part {
  int64_t firm;  // words that lie where they are throughout
  const uint64_t* const* at;
  const uint64_t* seen;
  int64_t beyond;  // those that lie there while the firm ones are the same
  const uint64_t* const* beyond_at;
  const uint64_t* beyond_seen;
  int64_t marks;  // those that lie there while all others are the same
  const uint32_t* const* mark_at;
  const uint32_t* marked;
};

struct Watched {
  int64_t parts;
  const Part* part;  // [parts]
  Runs runs;
  void* experience;
  int64_t spin_us, differs;
};

// What a team gives to a network: the beginning of its Run.
struct Share {
  void* team;
  int id, count;
  Watched* const* at;
};
}

namespace {

uint64_t word(const char* at) {
  uint64_t found;
  memcpy(&found, at, sizeof found);
  return found;
}

const char* pointer(const char* at) { return (const char*)word(at); }

template <class Number>
bool is_same(int64_t count, const Number* const* at, const Number* seen) {
  Number other = 0;
  for (int64_t i = 0; i < count; i++) other |= *at[i] ^ seen[i];
  return other == 0;
}

bool is_part_same(const Part& its) {
  return is_same(its.firm, its.at, its.seen) && is_same(its.beyond, its.beyond_at, its.beyond_seen) &&
         is_same(its.marks, its.mark_at, its.marked);
}

// One thread's share of the parts.
void look(const Share* run) {
  Watched& its = *run->at[0];
  for (int64_t i = run->id; i < its.parts; i += run->count)
    if (!is_part_same(its.part[i])) __atomic_store_n(&its.differs, 1, __ATOMIC_RELAXED);
}

const char* argument(const Call& its, const char* given, int64_t at) {
  return pointer(given + its.offsets.items + at * (int64_t)sizeof(void*));
}

bool is_alike(const Call& its, const char* item, const uint64_t* looked) {
  if (pointer(item + its.offsets.kind) != its.kind) return false;
  const char* tensor = pointer(item + its.offsets.tensor);
  uint64_t other = 0;
  for (int64_t i = 0; i < its.looks; i++) other |= (word(tensor + its.look[i]) ^ looked[i]) & its.mask[i];
  return other == 0;
}

char* data_of(const Call& its, const char* item, int64_t item_bytes) {
  const char* tensor = pointer(item + its.offsets.tensor);
  const char* data = pointer(pointer(tensor + its.offsets.storage) + its.offsets.data);
  return data ? const_cast<char*>(data) + (int64_t)word(tensor + its.offsets.offset) * item_bytes : nullptr;
}

}  // namespace

extern "C" {

// Whether all is what it was; nobody may change any of it meanwhile. Words of some thousand objects wait for memory: threads wait side by side.
int lowtide_unchanged(Watched* its, int threads) {
  its->differs = 0;
  void* at[] = {its};
  its->runs((void*)look, at, threads, its->spin_us, its->experience);
  return !its->differs;
}

// Runs a network on a tuple of tensors. `at` has room for the live arguments' addresses behind the first two. 0 where all is to be looked at
// again by other means, and nothing ran.
int lowtide_call(const Call* its, const char* given, void** at, int threads) {
  if ((int64_t)word(given + its->offsets.length) != its->arguments) return 0;
  for (int64_t i = 0; i < its->arguments; i++)
    if (!is_alike(*its, argument(*its, given, i), its->looked + i * its->looks)) return 0;
  for (int64_t i = 0; i < its->live; i++)
    if (!(at[2 + i] = data_of(*its, argument(*its, given, its->which[i]), its->item_bytes[i]))) return 0;
  its->runs(its->network, at, threads, its->spin_us, its->experience);
  return 1;
}
}
