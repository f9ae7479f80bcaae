#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sharp::cpu {
namespace {

using FindLoops = Loops (*)(const Attributes&);

struct InstructionSet {
  const char* name;
  bool available;
  FindLoops find;
};

FindLoops choose() {
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const InstructionSet sets[] = {{"avx512", has_avx512, avx512::find_loops},
                                 {"avx2", has_avx2, avx2::find_loops},
                                 {"baseline", true, baseline::find_loops}};
#elif defined(__aarch64__)
  const InstructionSet sets[] = {{"neon", true, baseline::find_loops}};  // every such processor has it
#else
  const InstructionSet sets[] = {{"baseline", true, baseline::find_loops}};
#endif
  const char* wanted = std::getenv("SHARP_ISA");
  std::string names;
  for (const InstructionSet& set : sets) {
    if (!set.available) continue;
    if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == set.name) return set.find;
    names += names.empty() ? set.name : std::string(", ") + set.name;
  }
  throw std::runtime_error("SHARP_ISA is '" + std::string(wanted) + "'; this processor can run: " + names);
}

}  // namespace

Loops find_loops(const Attributes& attributes) {
  static const FindLoops chosen = choose();
  return chosen(attributes);
}

}  // namespace sharp::cpu
