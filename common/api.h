#ifndef WEFT_COMMON_API_H_
#define WEFT_COMMON_API_H_

// Symbol visibility. Everything is hidden by default; a class or function that user code links
// against carries WEFT_API. Exceptions that cross a library border must carry it too, otherwise two
// libraries disagree on their type.

#define WEFT_API __attribute__((visibility("default")))

// What runs only when something has gone wrong. The compiler keeps it, and the branches that lead
// to it, away from the code beside it: the first call after a silence costs about as much as the
// pages that it touches.
#define WEFT_COLD __attribute__((cold))

#endif  // WEFT_COMMON_API_H_
