// safetensors_copy FROM TO: reads a file as weft does, and writes it as weft does.
#include <iostream>
#include <map>
#include <string>

#include "weft/common/files.h"
#include "weft/rpc/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto files = weft::make_system_files();
  const auto file = weft::SafetensorsFile::open(*files, argv[1]);
  weft::Status status = file.status();
  std::map<std::string, at::Tensor> tensors;
  if (file.ok()) {
    for (const auto& [name, entry] : file->header().tensors) {
      const auto tensor = file->read(name);
      if (!tensor.ok()) status = tensor.status();
      if (tensor.ok()) tensors.emplace(name, *tensor);
    }
  }
  if (status.ok()) {
    status = weft::write_safetensors(*files, argv[2], tensors, file->header().metadata);
  }
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
