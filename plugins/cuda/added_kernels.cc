// Kernels that were compiled after the library was built, for one model, read from a folder.
#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "kernels.h"

namespace sharp::cuda {
namespace {

constexpr const char* kIndex = "/kernels.tsv";
constexpr const char* kImages = "/kernels.bin";
constexpr size_t kColumns = 13;

// The memory that the images of a folder point into. It lives as long as the process.
struct Folder {
  std::vector<std::vector<std::string>> rows;
  std::string content;
};

std::mutex mutex;
std::deque<KernelImage>& images() {
  static auto& all = *new std::deque<KernelImage>;
  return all;
}

int64_t number(const std::string& text, const std::string& path) {
  if (text.empty() || text.size() > 12 || text.find_first_not_of("0123456789") != std::string::npos)
    throw Error(path + " is damaged: '" + text + "' is no number; compile the kernels again");
  return std::stoll(text);
}

const std::map<std::string, int64_t>& constants() {
  static const std::map<std::string, int64_t> all = {
      {"kDecodeWaves", kDecodeWaves},   {"kSplitKeys", kSplitKeys},
      {"kMostSplits", kMostSplits},     {"kMostTokens", kMostTokens},
      {"kMostRows", kMostRows},         {"kMostParts", kMostParts},
      {"kPartKeys", kPartKeys},         {"kListedKeys", kListedKeys},
      {"kSources", kSources},           {"kMostPromptRows", kMostPromptRows},
      {"kEntmaxCounts", kEntmaxCounts}, {"kSparsemaxCounts", kSparsemaxCounts}};
  return all;
}

}  // namespace

void for_each_added(const std::function<void(const KernelImage&)>& consider) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const KernelImage& image : images()) consider(image);
}

void add_kernels(const std::string& folder) {
  const std::string path = folder + kIndex;
  std::ifstream index(path), packed(folder + kImages, std::ios::binary);
  if (!index || !packed) throw Error(folder + " has no kernels: " + kIndex + " or " + kImages + " cannot be read");
  auto& kept = *new Folder;
  kept.content.assign(std::istreambuf_iterator<char>(packed), {});
  std::deque<KernelImage> added;
  for (std::string line; std::getline(index, line);) {
    std::vector<std::string> columns;
    std::istringstream text(line);
    for (std::string column; std::getline(text, column, '\t');) columns.push_back(column);
    if (columns.size() == 2) {  // a constant of the planner
      const auto found = constants().find(columns[0]);
      if (found == constants().end() || found->second != number(columns[1], path))
        throw Error(path + " was written by another version of Sharp; compile the kernels again");
      continue;
    }
    if (columns.size() != kColumns) throw Error(path + " is damaged; compile the kernels again");
    kept.rows.push_back(std::move(columns));
  }
  for (const std::vector<std::string>& row : kept.rows) {
    const int64_t offset = number(row[5], path), bytes = number(row[6], path), size = kept.content.size();
    if (bytes == 0 || bytes > size || offset > size - bytes)
      throw Error(path + " does not fit its kernels; compile them again");
    added.push_back({row[0].c_str(),
                     row[1].c_str(),
                     static_cast<int>(number(row[2], path)),
                     row[3] == "1",
                     row[4] == "1",
                     reinterpret_cast<const unsigned char*>(kept.content.data()) + offset,
                     static_cast<size_t>(bytes),
                     static_cast<unsigned>(number(row[7], path)),
                     static_cast<unsigned>(number(row[8], path)),
                     row[12].c_str(),
                     static_cast<int>(number(row[9], path)),
                     {number(row[10], path), number(row[11], path)}});
  }
  const std::lock_guard<std::mutex> lock(mutex);
  images().insert(images().end(), added.begin(), added.end());
}

}  // namespace sharp::cuda
