#include "weft/tests/fuzz/memory.h"

#include <cerrno>
#include <cstdlib>

#include "weft/tests/fuzz/target.h"

namespace {

thread_local bool counting = false;
thread_local DecodingMemory memory;

void count(size_t bytes) {
  if (counting) memory.allocated_bytes += bytes;
}

}  // namespace

void reset_decoding_memory() { memory = DecodingMemory(); }
DecodingMemory decoding_memory() { return memory; }

void Decoding::begin(size_t input_bytes) {
  if (input_bytes > 0) ++memory.messages;
  memory.input_bytes += input_bytes;
  counting = true;
}
void Decoding::end() { counting = false; }
void Decoding::charged(size_t bytes) { memory.charged_bytes += bytes; }

// The allocator of libc under its other names. operator new, protobuf and LibTorch all come here.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t n, size_t size);
void* __libc_realloc(void* p, size_t size);
void* __libc_memalign(size_t align, size_t size);

void* malloc(size_t size) {
  count(size);
  return __libc_malloc(size);
}
void* calloc(size_t n, size_t size) {
  count(n * size);
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t size) {
  count(size);
  return __libc_realloc(p, size);
}
void* aligned_alloc(size_t align, size_t size) {
  count(size);
  return __libc_memalign(align, size);
}
void* memalign(size_t align, size_t size) {
  count(size);
  return __libc_memalign(align, size);
}
int posix_memalign(void** out, size_t align, size_t size) {
  count(size);
  void* const p = __libc_memalign(align, size);
  if (p == nullptr) return ENOMEM;
  *out = p;
  return 0;
}
}
