#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sharp::cpu {
namespace {

struct InstructionSet {
  const char* name;
  bool available;
  Loops (*find)(const Attributes&);
  const VocabularyLoops* vocabulary;
};

InstructionSet choose() {
#if defined(__x86_64__)
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const InstructionSet sets[] = {{"avx512", has_avx512, avx512::find_loops, &avx512::vocabulary_loops},
                                 {"avx2", has_avx2, avx2::find_loops, &avx2::vocabulary_loops},
                                 {"baseline", true, baseline::find_loops, &baseline::vocabulary_loops}};
#elif defined(__aarch64__)
  const InstructionSet sets[] = {
      {"neon", true, baseline::find_loops, &baseline::vocabulary_loops}};  // every such processor has it
#else
  const InstructionSet sets[] = {{"baseline", true, baseline::find_loops, &baseline::vocabulary_loops}};
#endif
  const char* wanted = std::getenv("SHARP_ISA");
  std::string names;
  for (const InstructionSet& set : sets) {
    if (!set.available) continue;
    if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == set.name) return set;
    names += names.empty() ? set.name : std::string(", ") + set.name;
  }
  throw std::runtime_error("SHARP_ISA is '" + std::string(wanted) + "'; this processor can run: " + names);
}

const InstructionSet& chosen() {
  static const InstructionSet set = choose();
  return set;
}

}  // namespace

Loops find_loops(const Attributes& attributes) { return chosen().find(attributes); }

const VocabularyLoops& vocabulary_loops() { return *chosen().vocabulary; }

}  // namespace sharp::cpu
