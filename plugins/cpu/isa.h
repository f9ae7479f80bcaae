// The instruction sets that the loops are compiled for, and which of them this process uses.
#pragma once

#include "tile.h"
#include "vocabulary.h"

namespace sharp::cpu {

namespace baseline {
Loops find_loops(const Attributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace baseline
namespace avx2 {
Loops find_loops(const Attributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace avx2
namespace avx512 {
Loops find_loops(const Attributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace avx512
namespace avx512_vnni {
Loops find_loops(const Attributes& attributes);
}
namespace amx {
Loops find_loops(const Attributes& attributes);  // only where the compiler knows AMX: SHARP_AMX
}
namespace neon_dotprod {
Loops find_loops(const Attributes& attributes);  // only on Arm under Linux: SHARP_NEON_DOTPROD
}

// The loops of the attributes' normalizer for the best instruction set of this processor, or for the one that the
// environment variable SHARP_ISA names (baseline, avx2, avx512, avx512_vnni, amx; on Arm neon, neon_dotprod). Throws
// std::runtime_error when that one is unknown or the processor lacks it.
Loops find_loops(const Attributes& attributes);

// The sampler's loops, chosen in the same way.
const VocabularyLoops& vocabulary_loops();

}  // namespace sharp::cpu
