// Marks the functions that Python calls; everything else stays inside the library.
#pragma once

#define PDS_API extern "C" __attribute__((visibility("default")))
