// For wheels (SHARP_MANYLINUX): functions that would otherwise need a C library newer than 2.28. Each function is
// defined here, hidden, so that the linker finds it first, and calls the version that every C library since 2.28 has.
#include <sys/types.h>

#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
#else
#error "the first version of this architecture's C library is not known; add it"
#endif
// Declares that `name_base` here is `name` of the version BASE in the C library.
#define OLD(name) __asm__(".symver " #name "_base, " #name "@" BASE)
#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {

OLD(dlopen);
OLD(dlsym);
OLD(exp);
OLD(log);
OLD(pow);
OLD(pthread_once);
OLD(__pthread_key_create);

void* dlopen_base(const char*, int);
void* dlsym_base(void*, const char*);
double exp_base(double);
double log_base(double);
double pow_base(double, double);
int pthread_once_base(int*, void (*)());
int __pthread_key_create_base(unsigned*, void (*)(void*));
int getentropy(void*, size_t);
[[noreturn]] void abort();

HIDDEN void* dlopen(const char* name, int flags) { return dlopen_base(name, flags); }
HIDDEN void* dlsym(void* library, const char* name) { return dlsym_base(library, name); }
HIDDEN double exp(double x) { return exp_base(x); }
HIDDEN double log(double x) { return log_base(x); }
HIDDEN double pow(double x, double y) { return pow_base(x, y); }
HIDDEN int pthread_once(int* once, void (*run)()) { return pthread_once_base(once, run); }
HIDDEN int __pthread_key_create(unsigned* key, void (*destroy)(void*)) {
  return __pthread_key_create_base(key, destroy);
}

// New in 2.36, used by libstdc++'s random_device.
HIDDEN unsigned arc4random() {
  unsigned value = 0;
  if (getentropy(&value, sizeof value) != 0) abort();
  return value;
}

// New in 2.32. While it is 0, libstdc++ counts references with atomic operations, which is right for several threads.
HIDDEN char __libc_single_threaded = 0;
}
