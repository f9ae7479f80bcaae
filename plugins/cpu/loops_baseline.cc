#define SHARP_ISA baseline
#include "isa.h"
#include "loops.h"
#include "vocabulary_loops.h"

namespace sharp::cpu::baseline {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

const VocabularyLoops vocabulary_loops = kVocabularyLoops;

}  // namespace sharp::cpu::baseline
