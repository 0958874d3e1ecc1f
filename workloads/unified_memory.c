/* An allocator for torch.cuda.memory.CUDAPluggableAllocator: memory that host and device share, page
   by page (cudaMallocManaged). Its functions come from the runtime that torch has loaded already, so
   that nothing of CUDA or ROCm is needed to compile this. In C, not as callbacks into Python: backward
   allocates with torch's allocator locked, and waiting for the interpreter there would lock it up. */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef int (*allocate_fn)(void **pointer, size_t bytes, unsigned int flags);
typedef int (*free_fn)(void *pointer);

enum { ATTACH_GLOBAL = 1 }; /* cudaMemAttachGlobal, hipMemAttachGlobal: any stream may use it */

static allocate_fn allocate;
static free_fn release;
static _Atomic int64_t live_bytes, peak_bytes;
static _Atomic int last_error;

void chopper_managed_use(void *allocate_managed, void *free_memory) {
  allocate = (allocate_fn)allocate_managed;
  release = (free_fn)free_memory;
}

/* The stream is torch's for memory that is bound to one; managed memory is bound to none. */
void *chopper_managed_allocate(size_t bytes, int device, void *stream) {
  (void)device;
  (void)stream;
  void *pointer = NULL;
  int error = allocate ? allocate(&pointer, bytes, ATTACH_GLOBAL) : -1;
  if (error != 0) {
    atomic_store(&last_error, error);
    return NULL; /* torch raises its out-of-memory error */
  }
  int64_t now = atomic_fetch_add(&live_bytes, (int64_t)bytes) + (int64_t)bytes;
  int64_t peak = atomic_load(&peak_bytes);
  while (now > peak && !atomic_compare_exchange_weak(&peak_bytes, &peak, now)) {
  }
  return pointer;
}

void chopper_managed_free(void *pointer, size_t bytes, int device, void *stream) {
  (void)device;
  (void)stream;
  if (pointer && release && release(pointer) == 0) atomic_fetch_sub(&live_bytes, (int64_t)bytes);
}

int64_t chopper_managed_live_bytes(void) { return atomic_load(&live_bytes); }
int64_t chopper_managed_peak_bytes(void) { return atomic_load(&peak_bytes); }
int chopper_managed_last_error(void) { return atomic_load(&last_error); }
