// The instruction sets that the loops are compiled for, and the choice of one for this process.
#pragma once

#include "tile.h"
#include "vocabulary.h"

namespace sharp::cpu {

namespace baseline {
Loops find_loops(const SharpAttributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace baseline
namespace avx2 {
Loops find_loops(const SharpAttributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace avx2
namespace avx512 {
Loops find_loops(const SharpAttributes& attributes);
extern const VocabularyLoops vocabulary_loops;
}  // namespace avx512
namespace avx512_vnni {
Loops find_loops(const SharpAttributes& attributes);
}
namespace amx {
Loops find_loops(const SharpAttributes& attributes);  // only where the compiler knows AMX: SHARP_AMX
}
namespace neon_dotprod {
Loops find_loops(const SharpAttributes& attributes);  // only on Arm under Linux: SHARP_NEON_DOTPROD
}

// Returns the loops of the attributes' normalizer for the best instruction set of this processor, or for the set that
// the environment variable SHARP_ISA names (baseline, avx2, avx512, avx512_vnni, amx; on Arm neon, neon_dotprod).
// Throws std::runtime_error if SHARP_ISA names an unknown set, or one that the processor or this build lacks.
Loops find_loops(const SharpAttributes& attributes);

// Returns the sampler's loops for the instruction set chosen as in find_loops.
const VocabularyLoops& vocabulary_loops();

}  // namespace sharp::cpu
