# cmake -DHEADER=x.pb.h -P prepend_api.cmake: puts the include that defines WEFT_API at the top of a generated header.
file(READ "${HEADER}" text)
file(WRITE "${HEADER}" "#include \"weft/common/api.h\"\n${text}")
