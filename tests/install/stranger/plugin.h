// What the plugin offers: its functions, and what of them may be called from elsewhere.
#pragma once

#include <weft/weft.h>

#include <stdexcept>
#include <string>

int add(int a, int b);
torch::Tensor twice(torch::Tensor x);
std::string greet(const std::string& name);
int refuse(const std::string& why);

weft::Library make_library();
