use serde_json::{Map, Value, json};
use std::path::Path;

/// The header and the data of a safetensors file, which tests change and write back.
pub(crate) struct Weights {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Weights {
    pub(crate) fn read(path: &Path) -> Self {
        let content = std::fs::read(path).unwrap();
        let (length, rest) = content.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        Weights { header: serde_json::from_slice(header).unwrap(), data: data.to_vec() }
    }

    /// Returns the weights without the tensors that are not `kept`.
    pub(crate) fn filtered(self, kept: impl Fn(&str) -> bool) -> Self {
        let mut filtered = Weights { header: Map::new(), data: Vec::new() };
        for (name, entry) in self.header {
            let range = |index: usize| entry["data_offsets"][index].as_u64().map(|offset| offset as usize);
            let (Some(start), Some(end)) = (range(0), range(1)) else {
                filtered.header.insert(name, entry);
                continue;
            };
            if kept(&name) {
                filtered.add(&name, entry["shape"].clone(), &self.data[start..end]);
            }
        }
        filtered
    }

    /// Returns the weights and one more tensor.
    pub(crate) fn with(mut self, name: &str) -> Self {
        self.add(name, json!([2]), &[0; 8]);
        self
    }

    /// Returns the weights under other names.
    pub(crate) fn renamed(mut self, rename: impl Fn(&str) -> String) -> Self {
        let is_tensor = |name: &str| name != "__metadata__";
        let renamed =
            |(name, entry): (String, Value)| (if is_tensor(&name) { rename(&name) } else { name }, entry);
        self.header = self.header.into_iter().map(renamed).collect();
        self
    }

    /// Returns the weights, and a copy of one of them under another name.
    pub(crate) fn with_copy(mut self, name: &str, copy: &str) -> Self {
        let (shape, bytes) = (self.header[name]["shape"].clone(), self.bytes(name).to_vec());
        self.add(copy, shape, &bytes);
        self
    }

    pub(crate) fn bytes(&self, name: &str) -> &[u8] {
        let offset = |index: usize| self.header[name]["data_offsets"][index].as_u64().unwrap() as usize;
        &self.data[offset(0)..offset(1)]
    }

    /// Returns the weights, one of them with the shape of its transpose.
    pub(crate) fn transposed(mut self, name: &str) -> Self {
        self.header[name]["shape"].as_array_mut().unwrap().reverse();
        self
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.header.keys().filter(|name| *name != "__metadata__").cloned().collect()
    }

    /// Returns the weights, with the bytes of one of them as elements of another dtype.
    pub(crate) fn with_dtype(mut self, name: &str, dtype: &str) -> Self {
        self.header[name]["dtype"] = dtype.into();
        self
    }

    /// Returns the weights with `value` as the element `index` of one of them.
    pub(crate) fn with_value(mut self, name: &str, index: usize, value: f32) -> Self {
        let start =
            self.header[name]["data_offsets"][0].as_u64().unwrap() as usize + index * size_of::<f32>();
        self.data[start..start + size_of::<f32>()].copy_from_slice(&value.to_le_bytes());
        self
    }

    pub(crate) fn write(&self, path: &Path) {
        let header = serde_json::to_vec(&self.header).unwrap();
        let parts = [&(header.len() as u64).to_le_bytes()[..], &header, &self.data];
        std::fs::write(path, parts.concat()).unwrap();
    }

    fn add(&mut self, name: &str, shape: Value, bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend_from_slice(bytes);
        let offsets = [start, self.data.len()];
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        self.header.insert(name.to_owned(), entry);
    }
}
