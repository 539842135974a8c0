#ifndef WEFT_COMMON_API_H_
#define WEFT_COMMON_API_H_

// Symbol visibility. Everything is hidden by default; a class or function that user code links
// against carries WEFT_API. Exceptions that cross a library border must carry it too, otherwise two
// libraries disagree on their type.

#define WEFT_API __attribute__((visibility("default")))

#endif  // WEFT_COMMON_API_H_
