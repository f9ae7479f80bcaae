#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(SHARP_NEON_DOTPROD)
#include <sys/auxv.h>
#endif
#if defined(SHARP_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sharp::cpu {
namespace {

struct InstructionSet {
  const char* name;
  bool available;
  Loops (*find)(const SharpAttributes&);
  const VocabularyLoops* vocabulary;
};

#if defined(__x86_64__)
// Whether the processor has F16C, read by cpuid because Clang before version 15 has no name for it.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

#if defined(SHARP_AMX)
// Whether the processor has AMX for bfloat16 and the system lets this process use the tile registers (Linux 5.16).
bool may_use_amx() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & kAvx512Bf16)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

InstructionSet choose() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  const InstructionSet sets[] = {
#if defined(SHARP_AMX)
      {"amx", has_vnni && may_use_amx(), amx::find_loops, &avx512::vocabulary_loops},
#endif
      {"avx512_vnni", has_vnni, avx512_vnni::find_loops, &avx512::vocabulary_loops},
      {"avx512", has_avx512, avx512::find_loops, &avx512::vocabulary_loops},
      {"avx2", has_avx2, avx2::find_loops, &avx2::vocabulary_loops},
      {"baseline", true, baseline::find_loops, &baseline::vocabulary_loops}};
#elif defined(__aarch64__)
  const InstructionSet sets[] = {
#if defined(SHARP_NEON_DOTPROD)
      {"neon_dotprod", (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0, neon_dotprod::find_loops,
       &baseline::vocabulary_loops},
#endif
      {"neon", true, baseline::find_loops, &baseline::vocabulary_loops}};  // every 64-bit Arm processor has NEON
#else
  const InstructionSet sets[] = {{"baseline", true, baseline::find_loops, &baseline::vocabulary_loops}};
#endif
  const char* requested = std::getenv("SHARP_ISA");
  std::string names;
  for (const InstructionSet& set : sets) {
    if (!set.available) continue;
    if (requested == nullptr || *requested == '\0' || std::string(requested) == set.name) return set;
    names += names.empty() ? set.name : std::string(", ") + set.name;
  }
  throw std::runtime_error("SHARP_ISA is '" + std::string(requested) + "'; this processor can run: " + names);
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

Loops find_loops(const SharpAttributes& attributes) { return chosen().find(attributes); }

const VocabularyLoops& vocabulary_loops() { return *chosen().vocabulary; }

}  // namespace sharp::cpu
