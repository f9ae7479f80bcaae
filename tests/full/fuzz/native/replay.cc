// Runs a fuzz target over files, and over random bytes: replay COUNT [FILE...]. Needs no fuzzer.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int count, char** arguments) {
  for (int index = 2; index < count; ++index) {
    std::ifstream file(arguments[index], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::printf("%s\n", arguments[index]);
    std::fflush(stdout);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  const long runs = count > 1 ? std::atol(arguments[1]) : 0;
  for (long run = 0; run < runs; ++run) {
    std::minstd_rand random(static_cast<uint32_t>(run + 1));
    std::vector<uint8_t> bytes(8 + random() % 200);
    const uint32_t zeros = random() % 4;  // zeros among four bytes, because most inputs of the fuzzer are plain calls
    for (uint8_t& byte : bytes) byte = random() / 16 % 4 < zeros ? 0 : static_cast<uint8_t>(random() / 16);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld random inputs\n", runs);
  return 0;
}
