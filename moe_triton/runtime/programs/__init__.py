"""The programs by which native code makes `EPBuffer`'s usual calls, from the operators' descriptions."""
