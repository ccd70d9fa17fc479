// What the facade promises, one function a claim (rules_*.cc). Real processes, real signals.
//
//   rules [name ...]     runs those tests (default: all)    rules --list
#include "rules.h"

namespace shmrl::test {

std::vector<Rule>& rules() {
  static std::vector<Rule> all;
  return all;
}

}  // namespace shmrl::test

int main(int argc, char** argv) {
  using namespace shmrl::test;
  if (argc == 2 && std::string(argv[1]) == "--list") {
    for (const Rule& rule : rules()) std::printf("%s\n", rule.name);
    return 0;
  }
  int run = 0;
  for (const Rule& rule : rules()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::string(argv[i]) == rule.name;
    if (!wanted) continue;
    std::printf("%s\n", rule.name);
    std::fflush(stdout);
    rule.run();
    ++run;
  }
  std::printf("%d tests passed\n", run);
  return run > 0 ? 0 : 2;
}
